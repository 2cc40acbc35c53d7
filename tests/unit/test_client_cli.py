"""The command: what it prints where, and its exit codes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.responses import JSONResponse

from latentmill.cli import main
from tests.unit.client_support import KEY, RESTART, VIDEO, Farm, Site, job, problem, served, state, step, unused_url

RUNNING = job(status="running", seq=2, attempt=1, phase="text")
SNAPSHOT = {"type": "snapshot", "jobs": [job()]}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with served() as running:
        yield running


@pytest.fixture
def farm(site: Site, monkeypatch: pytest.MonkeyPatch) -> Farm:
    monkeypatch.setenv("LATENTMILL_URL", site.url)
    monkeypatch.setenv("LATENTMILL_API_KEY", KEY)
    return site.fresh()


@pytest.fixture
def done(farm: Farm) -> dict[str, object]:
    return job(status="succeeded", seq=3, attempt=1, result=farm.result())


Captured = pytest.CaptureFixture[str]


def test_submit_prints_the_id_alone_on_stdout(farm: Farm, capsys: Captured) -> None:
    asked = ["--size", "64x64", "--steps", "4", "--metadata", "shot=3", "--metadata", "take=a=b"]
    assert main(["submit", "a red circle", *asked]) == 0
    assert capsys.readouterr().out == f"{job()['id']}\n"
    sizes = {"size": "64x64", "num_inference_steps": 4}
    assert farm.bodies == [{"prompt": "a red circle", **sizes, "metadata": {"shot": "3", "take": "a=b"}}]


def test_submit_has_an_option_for_every_parameter(farm: Farm) -> None:
    numbers = {"seconds": 2.5, "fps": 16, "guidance_scale": 4, "guidance_scale_2": 3, "flow_shift": 5}
    options = [word for name, value in numbers.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["submit", "x", *options, "--deterministic", "--queue-deadline-s", "60"]) == 0
    assert farm.bodies == [{"prompt": "x", **numbers, "deterministic": True, "queue_deadline_s": 60}]


def test_a_refused_submit_prints_the_fields_and_exits_3(farm: Farm, capsys: Captured) -> None:
    errors = [{"field": "num_frames", "message": "must be 4k+1, not 8"}]
    farm.refusals.append(problem(400, "invalid_parameter", "a field is wrong", errors))
    assert main(["submit", "x"]) == 3
    told = capsys.readouterr()
    assert "num_frames: must be 4k+1, not 8" in told.err
    assert "latentmill models" in told.err
    assert told.out == ""


@pytest.mark.usefixtures("farm")
def test_a_missing_key_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.delenv("LATENTMILL_API_KEY")
    assert main(["get", "job_1"]) == 3
    assert "--api-key-file" in capsys.readouterr().err


def test_the_key_may_come_from_a_file(farm: Farm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LATENTMILL_API_KEY")
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert main(["get", farm.add(job()), "--api-key-file", str(file)]) == 0


@pytest.mark.usefixtures("farm")
def test_a_broken_key_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("LATENTMILL_API_KEY", "lm_se cret")
    assert main(["get", "job_1"]) == 2
    assert "cret" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["submit"], ["fly"], ["submit", "x", "--metadata", "novalue"], ["list", "--url", "ftp://x"]]
)
def test_wrong_use_exits_2(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_an_unreachable_server_exits_4(capsys: Captured) -> None:
    assert main(["get", "job_1", "--url", unused_url()]) == 4
    assert "LATENTMILL_URL" in capsys.readouterr().err


def test_behind_a_proxy_the_hint_names_it_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    proxy = unused_url().removeprefix("http://")
    monkeypatch.setenv("http_proxy", f"http://user:hunter2@{proxy}")
    monkeypatch.setenv("no_proxy", "elsewhere.example")
    assert main(["get", "job_1", "--url", "http://farm.example"]) == 4
    told = capsys.readouterr().err
    assert f"the proxy {proxy}" in told
    assert "farm.example to NO_PROXY" in told
    assert "hunter2" not in told


def test_a_server_that_is_not_behind_the_proxy_is_not_blamed_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("http_proxy", unused_url())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert main(["get", "job_1", "--url", unused_url()]) == 4
    assert "proxy" not in capsys.readouterr().err


def test_a_failing_server_exits_4(farm: Farm) -> None:
    farm.refusals.append(problem(500, "internal_error", "it broke"))
    assert main(["get", "job_1"]) == 4


def test_watch_in_a_pipe_prints_a_line_for_each_step_and_the_url(
    farm: Farm, done: dict[str, object], capsys: Captured
) -> None:
    farm.add(RUNNING)
    farm.scripts.append([SNAPSHOT, state(RUNNING), step(RUNNING, 1), RESTART])
    farm.scripts.append([{"type": "snapshot", "jobs": [RUNNING]}, step(RUNNING, 2), step(RUNNING, 3), state(done)])
    assert main(["watch", str(done["id"])]) == 0
    told = capsys.readouterr()
    assert told.out == f"{farm.result()['url']}\n"
    assert [line for line in told.err.splitlines() if "step 1/3" in line] == [f"{done['id']} denoise, step 1/3, ETA 2s"]
    assert all(f"step {number}/3" in told.err for number in (1, 2, 3))


def test_watch_json_prints_every_event_as_received(farm: Farm, done: dict[str, object], capsys: Captured) -> None:
    told = [SNAPSHOT, state(RUNNING), step(RUNNING, 1), state(done)]
    farm.scripts.append(told)
    assert main(["watch", str(done["id"]), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == told


def test_a_queued_job_shows_its_place(farm: Farm, done: dict[str, object], capsys: Captured) -> None:
    waiting = job(queue={"position": 3, "ahead": 2, "est_start_s": 125})
    farm.scripts.append([{"type": "snapshot", "jobs": [waiting]}, state(done)])
    main(["watch", str(done["id"])])
    assert "queued, position 3, starts in about 2m05s" in capsys.readouterr().err


def test_a_queued_job_shows_what_speaks_against_its_start(
    farm: Farm, done: dict[str, object], capsys: Captured
) -> None:
    place = {"position": 3, "ahead": 2, "est_start_s": None}
    waiting = [job(queue={**place, "note": note}) for note in (None, "no worker serves this model now")]
    farm.scripts.append([{"type": "snapshot", "jobs": [waiting[0]]}, state({**waiting[1], "seq": 2}), state(done)])
    main(["watch", str(done["id"])])
    assert "queued, position 3, no worker serves this model now" in capsys.readouterr().err


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
def test_watch_of_a_job_that_did_not_succeed_exits_1(farm: Farm, status: str, capsys: Captured) -> None:
    ended = job(status=status, seq=3, error={"code": "why", "message": "because", "class": None})
    farm.scripts.append([{"type": "snapshot", "jobs": [ended]}])
    assert main(["watch", ended["id"]]) == 1
    assert "why: because" in capsys.readouterr().err


def test_submit_download_waits_and_saves(farm: Farm, done: dict[str, object], tmp_path: Path, capsys: Captured) -> None:
    farm.scripts.append([SNAPSHOT, state(done)])
    target = tmp_path / "clip.mp4"

    def finish(document: dict[str, object]) -> str:
        farm.jobs[str(done["id"])] = done if farm.bodies else document
        return str(done["id"])

    farm.add = finish  # type: ignore[method-assign]  # the job is finished as soon as it is submitted
    assert main(["submit", "x", "--download", str(target)]) == 0
    assert target.read_bytes() == VIDEO
    assert f"saved {target}" in capsys.readouterr().err


def test_download_into_a_missing_folder_exits_2(farm: Farm, done: dict[str, object], tmp_path: Path) -> None:
    assert main(["download", farm.add(done), str(tmp_path / "no" / "clip.mp4")]) == 2


def test_a_damaged_download_exits_4(farm: Farm, done: dict[str, object], tmp_path: Path) -> None:
    farm.video = bytes(len(VIDEO))
    assert main(["download", farm.add(done), str(tmp_path)]) == 4


def test_download_of_an_unfinished_job_exits_1(farm: Farm, tmp_path: Path) -> None:
    assert main(["download", farm.add(job()), str(tmp_path)]) == 1


def _latentmill(*arguments: str, stdout: int = subprocess.PIPE) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "latentmill", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=dict(os.environ), check=False)


def test_download_to_a_dash_writes_the_video_alone_to_stdout(farm: Farm, done: dict[str, object]) -> None:
    ended = _latentmill("download", farm.add(done), "-")
    assert (ended.returncode, ended.stdout) == (0, VIDEO)
    assert f"{done['id']}: {len(VIDEO)} bytes" in ended.stderr.decode()


def test_submit_download_to_a_dash_writes_the_video_alone_to_stdout(farm: Farm, done: dict[str, object]) -> None:
    farm.scripts.append([SNAPSHOT, state(done)])
    farm.add = lambda _: farm.jobs.setdefault(str(done["id"]), done)["id"]  # type: ignore[method-assign]  # done at once
    ended = _latentmill("submit", "x", "--download", "-")
    assert (ended.returncode, ended.stdout) == (0, VIDEO)
    assert farm.result()["url"] in ended.stderr.decode()


def test_of_a_damaged_video_nothing_goes_to_stdout(farm: Farm, done: dict[str, object]) -> None:
    farm.video = bytes(len(VIDEO))
    ended = _latentmill("download", farm.add(done), "-")
    assert (ended.returncode, ended.stdout) == (4, b"")
    assert "SHA-256" in ended.stderr.decode()


@pytest.mark.parametrize("arguments", [["download", "job_1", "-"], ["submit", "x", "--download", "-"]])
def test_a_video_is_not_written_to_a_terminal(farm: Farm, arguments: list[str]) -> None:
    ours, terminal = os.openpty()
    try:
        ended = _latentmill(*arguments, stdout=terminal)
    finally:
        os.close(ours)
        os.close(terminal)
    assert ended.returncode == 2
    assert "- > video.mp4" in ended.stderr.decode()
    assert farm.requests == []


def test_a_video_and_documents_do_not_share_stdout(farm: Farm, capsys: Captured) -> None:
    assert main(["submit", "x", "--download", "-", "--json"]) == 2
    assert "--json and - both need stdout" in capsys.readouterr().err
    assert farm.requests == []


def test_a_file_may_be_named_like_a_dash(
    farm: Farm, done: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["download", farm.add(done), "./-"]) == 0
    assert (tmp_path / "-").read_bytes() == VIDEO


def test_cancel_tries_every_job_and_exits_with_the_worst(farm: Farm, capsys: Captured) -> None:
    running, finished = farm.add(job(1, "running")), farm.add(job(2, "succeeded"))
    assert main(["cancel", finished, running]) == 3
    assert f"{running} cancel requested" in capsys.readouterr().err


def test_get_shows_the_job_without_control_characters(farm: Farm, capsys: Captured) -> None:
    assert main(["get", farm.add(job(params={"prompt": "red\x1b[2J circle"}))]) == 0
    out = capsys.readouterr().out
    assert "red [2J circle" in out
    assert "\x1b" not in out


# A C1 control sequence, a right-to-left override, and a title change that some terminals answer.
STEERING = "a\x9b2Jb\u202ec\x1b]0;d\x07"


@pytest.mark.parametrize("where", ["params", "metadata"])
def test_names_of_the_servers_steer_no_terminal(farm: Farm, capsys: Captured, where: str) -> None:
    main(["get", farm.add(job(**{where: {STEERING: STEERING}}))])
    assert not set(capsys.readouterr().out) & set("\x9b\u202e\x1b\x07")


def test_an_id_and_an_address_steer_no_terminal(farm: Farm, done: dict[str, object], capsys: Captured) -> None:
    farm.refusals.append(JSONResponse(job() | {"id": STEERING}, 202))
    assert main(["submit", "x"]) == 0
    farm.scripts.append([SNAPSHOT, state(done | {"result": farm.result(url=f"http://{STEERING}")})])
    assert main(["watch", str(done["id"])]) == 0
    told = capsys.readouterr()
    assert not set(told.out + told.err) & set("\x9b\u202e\x1b\x07")


def test_json_on_a_terminal_shows_escapes_and_in_a_pipe_the_text(
    farm: Farm, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = farm.add(job(params={"prompt": f"ä{STEERING}"}))
    main(["get", job_id, "--json"])
    piped = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["get", job_id, "--json"])
    shown = capsys.readouterr().out
    assert "ä" in piped
    assert shown.isascii()
    assert json.loads(shown) == json.loads(piped)


def test_list_prints_a_table_that_is_not_cut(farm: Farm, capsys: Captured) -> None:
    ids = [farm.add(job(number, params={"prompt": "[red] circle"})) for number in range(3)]
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(job_id in out for job_id in ids)
    assert "[red] circle" in out


def test_list_json_prints_a_document_a_line(farm: Farm, capsys: Captured) -> None:
    for number in range(3):
        farm.add(job(number))
    assert main(["list", "--json", "--limit", "2"]) == 0
    assert [json.loads(line)["object"] for line in capsys.readouterr().out.splitlines()] == ["job", "job"]


def test_errors_are_documents_too_in_json(farm: Farm, capsys: Captured) -> None:
    assert farm.jobs == {}
    assert main(["get", "job_x", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["object"], told["status"], told["code"]) == ("error", 404, "not_found")


def test_help_tells_the_exit_codes(capsys: Captured) -> None:
    assert main(["submit", "--help"]) == 0
    assert "130  Ctrl-C; the job goes on" in capsys.readouterr().out


def test_ctrl_c_leaves_the_job_alone_and_says_how_to_watch_it_again(farm: Farm) -> None:
    farm.scripts.append([SNAPSHOT])
    command = [sys.executable, "-m", "latentmill", "watch", job()["id"]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as watching:
        assert watching.stderr is not None
        assert "queued" in watching.stderr.readline()
        watching.send_signal(signal.SIGINT)
        rest = watching.stderr.read()
    assert watching.returncode == 130
    assert f"latentmill watch {job()['id']}" in rest
    assert not any(path.endswith("/cancel") for path in farm.paths())
