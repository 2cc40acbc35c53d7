"""The child process: what its parent sees when it works, dies, hangs or is cancelled, and when the parent dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.engine_support import Recorder, batch, is_step, parameters, process_ended, wait_until
from worker.engine.base import (
    Batch,
    BatchDone,
    EngineConfig,
    Event,
    FramesReady,
    MemberCancelled,
    MemberDecoded,
    MemberInterrupted,
)
from worker.engine.frames import SLOTS
from worker.engine.link import child_environment
from worker.engine.process import (
    ChildCrashedError,
    EngineProcess,
    EngineStalledError,
    EngineStartError,
    EngineTimeoutError,
)
from worker.engine.synthetic import draw_chunks

CONFIG = EngineConfig("synthetic", "tiny-wan2.2-t2v", synthetic_step_s=0.005)
START_S = 30


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess(CONFIG)
    process.start(START_S)
    yield process
    process.kill()


def events(
    engine: EngineProcess, work: Batch, stall_s: float = 20, limit_s: float = 30
) -> Generator[Event, None, None]:
    return engine.run(work, stall_s=stall_s, deadline=time.monotonic() + limit_s)


def run(engine: EngineProcess, work: Batch) -> Recorder:
    recorder = Recorder()
    for event in events(engine, work):
        recorder.emit(event)
    return recorder


def test_the_capabilities_come_from_the_child() -> None:
    engine = EngineProcess(replace(CONFIG, max_batch=3))
    capabilities = engine.start(START_S)
    engine.stop(5)
    assert (capabilities.engine, capabilities.model, capabilities.max_batch) == ("synthetic", CONFIG.model, 3)


def test_frames_arrive_as_they_were_drawn(engine: EngineProcess) -> None:
    recorder = run(engine, batch(parameters(num_frames=17)))
    expected = np.concatenate([chunk for _, chunk in draw_chunks(parameters(num_frames=17))])
    assert np.array_equal(recorder.frames(), expected)
    assert isinstance(recorder.events[-1], BatchDone)


def test_all_slots_come_back(engine: EngineProcess) -> None:
    for _ in range(3):  # many more chunks than there are slots
        run(engine, batch(*[parameters(num_frames=17)] * 4))
    assert engine.frames_lent == 0


def test_the_child_waits_for_slots_without_being_taken_for_hung(engine: EngineProcess) -> None:
    held: list[FramesReady] = []
    decoded = 0
    for event in events(engine, batch(*[parameters(num_frames=17)] * 3), stall_s=1.0):
        if isinstance(event, FramesReady):
            held.append(event)
        if len(held) == SLOTS:  # all are taken: outlast the stall limit, then let the child go on
            until = time.monotonic() + 1.2
            wait_until(lambda limit=until: time.monotonic() > limit)  # type: ignore[misc]
            while held:
                held.pop().release()
        decoded += isinstance(event, MemberDecoded)
    assert decoded == 3


def test_frames_may_be_released_after_the_batch(engine: EngineProcess) -> None:
    held = [event for event in events(engine, batch(parameters())) if isinstance(event, FramesReady)]
    recorder = run(engine, batch(parameters()))
    for event in held:
        event.release()
        event.release()  # a second time does nothing
    assert len(recorder.frames()) == 9
    assert engine.frames_lent == 0


def test_a_crash_is_noticed_at_once(engine: EngineProcess) -> None:
    crashing = events(engine, batch(parameters("[crash]")))
    next(crashing)
    began = time.monotonic()
    with pytest.raises(ChildCrashedError, match="SIGSEGV") as caught:
        list(crashing)
    assert time.monotonic() - began < 1
    assert "Segmentation fault" in caught.value.last_words
    assert not engine.alive


def test_a_hung_child_is_killed_and_replaced(engine: EngineProcess) -> None:
    first = engine.pid
    with pytest.raises(EngineStalledError):
        list(events(engine, batch(parameters("[hang]")), stall_s=0.3))
    assert first is not None
    assert process_ended(first)
    engine.start(START_S)
    assert isinstance(run(engine, batch(parameters())).outcomes()["j0"], MemberDecoded)


def test_a_child_that_overruns_its_deadline_is_killed(engine: EngineProcess) -> None:
    with pytest.raises(EngineTimeoutError):
        list(engine.run(batch(parameters("[hang]")), stall_s=60, deadline=time.monotonic() + 0.3, grace_s=0.2))
    assert not engine.alive


def test_a_child_that_asks_for_it_is_ended_before_its_batch_is_reported(engine: EngineProcess) -> None:
    recorder = Recorder()
    for event in events(engine, batch(parameters("[worn]"))):
        recorder.emit(event)
        if isinstance(event, BatchDone):
            assert not engine.alive
    assert isinstance(recorder.outcomes()["j0"], MemberDecoded)
    assert recorder.events[-1] == BatchDone("batch", healthy=False)


def test_a_cancel_arrives_in_the_middle_of_a_batch(engine: EngineProcess) -> None:
    recorder = Recorder()
    for event in events(engine, batch(parameters("[slow=0.05]"), parameters())):
        recorder.emit(event)
        if is_step(1)(event):
            engine.cancel(["j0"])
    outcomes = recorder.outcomes()
    assert isinstance(outcomes["j0"], MemberCancelled)
    assert isinstance(outcomes["j1"], MemberDecoded)


def test_a_cancel_may_overtake_its_batch(engine: EngineProcess) -> None:
    engine.cancel(["j0"])
    assert isinstance(run(engine, batch(parameters())).outcomes()["j0"], MemberCancelled)
    assert isinstance(run(engine, batch(parameters())).outcomes()["j0"], MemberDecoded)


def test_an_interrupt_brings_the_members_back(engine: EngineProcess) -> None:
    recorder = Recorder()
    for event in events(engine, batch(parameters("[slow=5]"), parameters())):
        recorder.emit(event)
        engine.interrupt()
    assert all(isinstance(outcome, MemberInterrupted) for outcome in recorder.outcomes().values())


def test_leaving_a_batch_early_ends_the_child(engine: EngineProcess) -> None:
    abandoned = events(engine, batch(parameters("[slow=5]")))
    next(abandoned)
    abandoned.close()
    assert not engine.alive


def test_a_child_that_cannot_load_says_why() -> None:
    engine = EngineProcess(EngineConfig("wan", "tiny-wan2.2-t2v", Path("/nonexistent")))
    with pytest.raises(EngineStartError, match="nonexistent"):
        engine.start(60)
    assert not engine.alive


def test_a_child_that_is_not_ready_in_time_is_killed() -> None:
    engine = EngineProcess(CONFIG)
    with pytest.raises(EngineStartError, match="not ready in time"):
        engine.start(0.001)
    assert not engine.alive


def test_a_terminal_ctrl_c_does_not_end_the_child(engine: EngineProcess) -> None:
    assert engine.pid is not None
    for ignored in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pid, ignored)
    assert isinstance(run(engine, batch(parameters())).outcomes()["j0"], MemberDecoded)


def test_no_secret_of_the_service_reaches_the_child() -> None:
    inherited = {"LATENTMILL_S3_SECRET_KEY": "hidden", "PATH": "/bin"}
    assert "LATENTMILL_S3_SECRET_KEY" not in child_environment(CONFIG, inherited)


def test_the_frames_have_no_name_that_could_be_left_behind(engine: EngineProcess) -> None:
    maps = Path(f"/proc/{engine.pid}/maps").read_text(encoding="utf-8")
    assert "memfd:latentmill-frames" in maps
    assert "/dev/shm" not in maps  # noqa: S108 - looked for, not written


ORPHAN = """
import sys, time
from tests.unit.engine_support import batch, parameters
from worker.engine.base import EngineConfig, StepDone
from worker.engine.process import EngineProcess
engine = EngineProcess(EngineConfig("synthetic", "tiny-wan2.2-t2v", synthetic_step_s=0.01))
engine.start(30)
for event in engine.run(batch(parameters(sys.argv[1])), stall_s=60, deadline=time.monotonic() + 60):
    if isinstance(event, StepDone):
        print(engine.pid, flush=True)
"""


@pytest.mark.parametrize("prompt", ["[slow=5]", "[hang]"])
def test_the_child_ends_when_its_parent_is_killed(prompt: str) -> None:
    orphan = ORPHAN if prompt == "[hang]" else ORPHAN.replace("StepDone)", "object)")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", orphan, prompt]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(next(line for line in parent.stdout if line.strip().isdigit()))
        parent.kill()
    wait_until(lambda: process_ended(child))
