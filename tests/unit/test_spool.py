import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker.spool import SpoolTakenError, open_spool


def test_a_spool_belongs_to_one_process(tmp_path: Path) -> None:
    with open_spool(tmp_path, "host:0"), pytest.raises(SpoolTakenError), open_spool(tmp_path, "host:0"):
        pass


def test_workers_have_spools_of_their_own(tmp_path: Path) -> None:
    with open_spool(tmp_path, "host:0") as first, open_spool(tmp_path, "host:1") as second:
        assert first != second


def test_a_new_process_finds_its_spool_empty(tmp_path: Path) -> None:
    with open_spool(tmp_path, "w") as spool:
        (spool / "left.mp4").write_bytes(b"x")
    with open_spool(tmp_path, "w") as spool:
        assert list(spool.glob("*.mp4")) == []


def test_a_worker_id_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    with open_spool(tmp_path / "spool", "../../etc") as spool:
        assert spool.parent == tmp_path / "spool"


@pytest.mark.parametrize("worker_id", [".", "..", ".lock"])
def test_a_worker_id_of_dots_is_a_folder_like_any_other(tmp_path: Path, worker_id: str) -> None:
    with open_spool(tmp_path / "spool", worker_id) as spool:
        assert spool.parent == tmp_path / "spool"
        assert spool.name.startswith("_")


def test_the_spool_of_a_worker_that_is_gone_is_removed_by_the_next_one(tmp_path: Path) -> None:
    with open_spool(tmp_path, "gone") as gone:
        (gone / "left.mp4").write_bytes(b"x")
        (gone / "left.mp4.part").write_bytes(b"x")
    with open_spool(tmp_path, "new") as spool:
        assert [folder for folder in tmp_path.iterdir() if folder.is_dir()] == [spool]


def test_the_spool_of_a_killed_process_is_removed_too(tmp_path: Path) -> None:
    held = (
        "import pathlib, sys, worker.spool\n"
        "with worker.spool.open_spool(pathlib.Path(sys.argv[1]), 'killed') as spool:\n"
        "    (spool / 'left.mp4').write_bytes(b'x')\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", held, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "held\n"
        with open_spool(tmp_path, "first"):
            assert (tmp_path / "killed" / "left.mp4").exists()
        worker.kill()
    with open_spool(tmp_path, "second"):
        assert not (tmp_path / "killed").exists()


def test_what_no_worker_put_there_stays(tmp_path: Path) -> None:
    with open_spool(tmp_path / "other", "w") as other:
        (other / "left.mp4").write_bytes(b"x")
    parent = tmp_path / "spool"
    with open_spool(parent, "gone") as gone:
        (gone / "notes.txt").write_bytes(b"x")
    (parent / "foreign").mkdir()
    (parent / "foreign" / "clip.mp4").write_bytes(b"x")
    (parent / "link").symlink_to(other)
    with open_spool(parent, "new"):
        assert (parent / "gone" / "notes.txt").exists()
        assert (parent / "foreign" / "clip.mp4").exists()
        assert (other / "left.mp4").exists()


def test_workers_that_start_and_leave_at_the_same_moment_keep_their_spools(tmp_path: Path) -> None:
    def come_and_go(worker: int) -> None:
        for _ in range(40):
            with open_spool(tmp_path, f"w{worker}") as spool:
                (spool / "new.mp4").write_bytes(b"x")
                assert (spool / "new.mp4").exists()

    with ThreadPoolExecutor(8) as workers:
        list(workers.map(come_and_go, range(8)))
