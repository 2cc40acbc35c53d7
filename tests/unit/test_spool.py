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
