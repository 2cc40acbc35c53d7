"""`make test-compose`: one compose stack, started twice; the files of tests go through its life in their order."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from latentmill import Client
from latentmill.models import Job
from tests.compose.report import Report
from tests.compose.stack import ComposeStack, docker, tail_of_each_service

PROMPT = "a red circle moving right on a blue background"
TINY = "tiny-wan2.2-t2v"
WORKERS = 3
IMAGES = ("latentmill/server", "latentmill/worker:cpu", "latentmill/worker:synthetic", "latentmill/client")
# The first build installs PyTorch.
BUILD_TIMEOUT_S = 1800.0
# What a test may take with the fixtures that it starts.
TEST_TIMEOUT_S = BUILD_TIMEOUT_S + 600
FINISH_TIMEOUT_S = 120.0

run = Report()
ended = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        _need_docker()
    # Ended from outside, the stack is removed all the same.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _need_docker() -> None:
    for command in (["docker", "compose", "version"], ["docker", "info"]):
        try:
            answers = subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            answers = False
        if not answers:
            message = (
                f"test-compose: `{' '.join(command)}` fails: install Docker with its compose plugin, start its engine "
                "and be of the group `docker`, or name another engine in DOCKER_HOST. `make test` needs none"
            )
            raise pytest.UsageError(message)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.skipped:
        run.count(report.nodeid, report.when or "", passed=report.passed)


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[ended] = not session.config.option.collectonly
    if session.config.stash[ended] and session.exitstatus == pytest.ExitCode.OK and not run.passed:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if run.figures:
        terminalreporter.section("times and sizes")
        terminalreporter.write_line(run.text())


def pytest_unconfigure(config: pytest.Config) -> None:
    """The very last line, for whoever reads no more than that."""
    if config.stash.get(ended, False):
        sys.stdout.write(f"{run.last_line()}\n")


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest) -> Iterator[ComposeStack]:
    """The stack, its images built, nothing started yet."""
    stack = ComposeStack(run)
    try:
        _build(stack)
        yield stack
    finally:
        stack.destroy()
        if request.session.testsfailed:
            _show_logs(stack)


def _build(stack: ComposeStack) -> None:
    with stack.timed("build of the images"):
        stack.compose("--profile=tools", "build", within_s=BUILD_TIMEOUT_S)
        stack.use_synthetic_workers()
        stack.compose("build", "worker", within_s=BUILD_TIMEOUT_S)
        stack.use_real_workers()
    for image in IMAGES:
        size = int(docker("image", "inspect", "--format={{.Size}}", image))
        stack.note(f"size of {image}", f"{size / 1e6:.0f} MB")


def _show_logs(stack: ComposeStack) -> None:
    for log in stack.saved_logs():
        sys.stdout.write(f"\n{log}, the end of each container's log:\n{tail_of_each_service(log)}\n")


@pytest.fixture(scope="session")
def first_stack(stack: ComposeStack) -> ComposeStack:
    """The stack as most users start it: nothing was there before."""
    with stack.timed("up --wait from nothing"):
        stack.up()
    return stack


@dataclass(frozen=True, slots=True)
class FirstVideo:
    """The address that the documented command prints, its finished job, and another one whose video nobody read."""

    address: str
    job: Job
    unread: Job


@pytest.fixture(scope="session")
def first_video(first_stack: ComposeStack) -> FirstVideo:
    with first_stack.timed("first key, by its command"):
        first_stack.api_key = first_stack.make_key("demo")
    with first_stack.timed("first video, by its command"):
        address = first_stack.compose("run", "--rm", "-T", "cli", "submit", PROMPT, "--watch").strip()
    with Client(first_stack.public_url, first_stack.api_key) as client:
        (job,) = client.list()
        unread = client.wait(client.submit(PROMPT, model=TINY, seed=1).id, timeout_s=FINISH_TIMEOUT_S)
    return FirstVideo(address, job, unread)


@pytest.fixture(scope="session")
def synthetic_stack(first_video: FirstVideo, stack: ComposeStack) -> ComposeStack:
    """The same stack after `down` and `up`, with three workers that draw clips."""
    with stack.timed("down"):
        stack.down()
    stack.use_synthetic_workers()
    stack.scale = {"worker": WORKERS}
    with stack.timed(f"up --wait with data, {WORKERS} synthetic workers"):
        stack.up()
    return stack


@pytest.fixture
def client(stack: ComposeStack) -> Iterator[Client]:
    with Client(stack.public_url, stack.api_key) as client:
        yield client
