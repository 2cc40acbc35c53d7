"""A whole stack, as `make up` starts it, with two Wan2.2 workers and two synthetic ones for slow jobs and faults."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx
import pytest

from infra.local.options import StackOptions
from infra.local.stack import LocalStack
from latentmill import Client
from tests.conftest import REPOSITORY, stack_directory

TINY = "tiny-wan2.2-t2v"
# The synthetic workers serve a profile that no real worker of this stack serves, so that each job has its engine.
SLOW = "wan2.2-ti2v-5b"
SMALL: dict[str, Any] = {"model": SLOW, "size": "128x128", "num_frames": 5, "num_inference_steps": 10}
SYNTHETIC = {
    "LATENTMILL_ENGINE": "synthetic",
    "LATENTMILL_MODEL": SLOW,
    "LATENTMILL_SYNTHETIC_STEP_S": "0.02",
    "LATENTMILL_MAX_BATCH": "4",
    "LATENTMILL_STALL_S": "4",
}
# A lost worker is noticed within this instead of 45 s.
LEASE_S = 6
LEASES = {"LATENTMILL_LEASE_S": str(LEASE_S), "LATENTMILL_HEARTBEAT_S": "1"}
PROMPT = "a red circle moving right on a blue background"


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    options = StackOptions(
        directory=stack_directory("whole"),
        workers=2,
        worker_env=LEASES | {"LATENTMILL_MAX_BATCH": "4"},
        dispatcher_env=LEASES | {"LATENTMILL_TICKET_LOST_AFTER_S": "6", "LATENTMILL_TICKET_RECHECK_S": "4"},
    )
    whole = LocalStack(options)
    try:
        whole.start()
        whole.start_part("worker-3", SYNTHETIC)
        whole.start_part("worker-4", SYNTHETIC)
        yield whole
    finally:
        whole.destroy()


def make_key(stack: LocalStack, tenant: str, *options: str) -> str:
    command = [sys.executable, "-m", "api.keys", "create", "--tenant", tenant, "--name", "test", "--quiet", *options]
    environment = {**os.environ, **stack.environment}
    made = subprocess.run(command, env=environment, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return made.stdout.strip()


@pytest.fixture(scope="session")
def api_key(stack: LocalStack) -> str:
    return make_key(stack, "team")


@pytest.fixture
def client(stack: LocalStack, api_key: str) -> Iterator[Client]:
    with Client(stack.public_url, api_key) as client:
        yield client


@pytest.fixture
def http(stack: LocalStack, api_key: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {api_key}"}
    with httpx.Client(base_url=stack.public_url, headers=headers, timeout=30) as client:
        yield client


T = TypeVar("T")


def until(read: Callable[[], T], holds: Callable[[T], bool], within_s: float = 60.0) -> T:
    """Read until the condition holds; the last reading. Fails with it when time is up."""
    deadline = time.monotonic() + within_s
    while not holds(value := read()):
        assert time.monotonic() < deadline, f"still {value!r} after {within_s} s"
        time.sleep(0.05)
    return value


def status_of(client: Client, job_id: str) -> Any:
    return client.get(job_id).status
