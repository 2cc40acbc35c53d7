"""Which GPU a worker gets: real locks, in real processes; only the list of devices is made up."""

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from worker.claim_gpu import GpuClaimError, choices, claim_gpu

UUIDS = ["GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbbb3333"]
# Claims, and holds the claim while a child, started as the engine's is, tells what it sees and its process id.
CLAIM = """
import pathlib, subprocess, sys, worker.claim_gpu
seen = "os.environ['CUDA_VISIBLE_DEVICES'], os.getpid()"
tell = f"import os, sys; print({seen}, file=sys.stderr, flush=True); sys.stdin.read()"
with worker.claim_gpu.claim_gpu(sys.argv[2:], pathlib.Path(sys.argv[1])):
    subprocess.run([sys.executable, "-c", tell])
"""


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever the claim sets
        monkeypatch.delenv(name)


@dataclass(frozen=True, slots=True)
class Claimed:
    worker: "subprocess.Popen[str]"
    gpu: str  # as its child sees it
    child_pid: int


@contextmanager
def _worker(folder: Path, uuids: list[str]) -> Iterator[Claimed]:
    command = [sys.executable, "-c", CLAIM, str(folder), *uuids]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stderr is not None
        try:
            gpu, child_pid = worker.stderr.readline().split()
            yield Claimed(worker, gpu, int(child_pid))
        finally:
            worker.kill()  # the child ends with its standard input


def test_each_worker_gets_a_gpu_of_its_own(tmp_path: Path) -> None:
    with _worker(tmp_path, UUIDS) as first, _worker(tmp_path, UUIDS) as second:
        assert [first.gpu, second.gpu] == UUIDS[:2]
        with claim_gpu(UUIDS, tmp_path) as third:
            assert third == UUIDS[2]


def test_a_worker_too_many_is_told_how_many_gpus_there_are(tmp_path: Path) -> None:
    with _worker(tmp_path, UUIDS[:1]), pytest.raises(GpuClaimError, match="all 1 GPUs are claimed"):  # noqa: SIM117
        with claim_gpu(UUIDS[:1], tmp_path):
            pass


def test_the_gpu_of_a_killed_worker_is_free_while_its_engine_child_still_lives(tmp_path: Path) -> None:
    with _worker(tmp_path, UUIDS[:1]) as claimed:
        claimed.worker.kill()
        claimed.worker.wait()
        os.kill(claimed.child_pid, 0)  # it is there
        with claim_gpu(UUIDS[:1], tmp_path) as uuid:
            assert uuid == claimed.gpu


def test_cuda_sees_the_claimed_gpu_alone(tmp_path: Path) -> None:
    with claim_gpu(UUIDS, tmp_path):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == UUIDS[0]
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_claim_ends_with_its_block(tmp_path: Path) -> None:
    for _ in range(2):
        with claim_gpu(UUIDS, tmp_path) as uuid:
            assert uuid == UUIDS[0]


@pytest.mark.parametrize(
    ("visible", "left"),
    [
        (None, UUIDS),
        ("1,0", [UUIDS[1], UUIDS[0]]),
        ("GPU-bbbb3333", [UUIDS[2]]),
        ("GPU-a, 0", [UUIDS[0]]),
        ("MIG-cccc", ["MIG-cccc"]),
    ],
)
def test_cuda_visible_devices_limits_the_choice(visible: str | None, left: list[str]) -> None:
    assert choices(UUIDS, visible) == left


@pytest.mark.parametrize("visible", ["3", "-1", "GPU-bbbb", "GPU-dddd", "0,none"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(visible: str) -> None:
    with pytest.raises(GpuClaimError, match=r"CUDA_VISIBLE_DEVICES: .* it has GPU-aaaa1111, GPU-bbbb2222"):
        choices(UUIDS, visible)


def test_no_visible_device_is_an_error() -> None:
    with pytest.raises(GpuClaimError, match="hides every GPU"):
        choices(UUIDS, "")


def test_the_old_name_of_a_mig_instance_makes_no_path(tmp_path: Path) -> None:
    with claim_gpu(["MIG-GPU-aaaa/1/0"], tmp_path) as uuid:
        assert uuid == "MIG-GPU-aaaa/1/0"


def test_lock_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    with claim_gpu(UUIDS, tmp_path / "locks"):
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "locks", *(tmp_path / "locks").iterdir())]
    assert modes == [0o700, 0o600]


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    folder.mkdir()
    (folder / f"{UUIDS[0]}.lock").symlink_to(tmp_path / "target")
    with pytest.raises(GpuClaimError, match="LATENTMILL_GPU_LOCK_DIR"), claim_gpu(UUIDS, folder):
        pass
    assert not (tmp_path / "target").exists()


def test_a_folder_where_everybody_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(GpuClaimError, match="not everybody may write"), claim_gpu(UUIDS, tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = re.escape(f"LATENTMILL_GPU_LOCK_DIR: {tmp_path / 'file'} cannot be used")
    with pytest.raises(GpuClaimError, match=told), claim_gpu(UUIDS, tmp_path / "file"):
        pass
