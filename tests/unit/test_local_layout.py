import os
from pathlib import Path

import pytest

from infra.local import layout as layout_module
from infra.local.layout import Layout, write_private
from infra.local.part import StackError


def test_a_new_directory_is_made_and_marked(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path / "a" / "stack")

    layout.create()

    assert layout.exists()
    layout.create()


def test_a_directory_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()

    with pytest.raises(StackError, match="not empty"):
        Layout.at(tmp_path).create()

    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")

    with pytest.raises(StackError, match="is a link"):
        Layout.at(tmp_path / "link").create()


def test_a_directory_that_others_may_write_to_is_refused_even_with_a_marker(tmp_path: Path) -> None:
    Layout.at(tmp_path).create()
    tmp_path.chmod(0o777)

    with pytest.raises(StackError, match="others may write"):
        Layout.at(tmp_path).create()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65_534, -1)

    with pytest.raises(StackError, match="another user"):
        Layout.at(tmp_path).create()


def test_removal_leaves_what_no_stack_made(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path / "stack")
    layout.create()
    write_private(layout.ports, "{}")
    (layout.root / ".ports.json.left").touch()
    (layout.root / "precious").touch()

    layout.remove()

    assert [entry.name for entry in layout.root.iterdir()] == ["precious"]


def test_removal_takes_the_directory_when_nothing_else_is_in_it(tmp_path: Path) -> None:
    layout = Layout.at(tmp_path / "stack")
    layout.create()

    layout.remove()

    assert not layout.root.exists()


def test_the_checkouts_own_directory_may_hold_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "DEFAULT_DIRECTORY", tmp_path)
    for name in ("rabbitmq", "test-servers-main"):
        (tmp_path / name).mkdir()
    layout = Layout.at(tmp_path)

    layout.create()
    layout.remove()

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["rabbitmq", "test-servers-main"]


def test_the_checkouts_own_directory_may_not_hold_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "DEFAULT_DIRECTORY", tmp_path)
    (tmp_path / "precious").touch()

    with pytest.raises(StackError, match="precious"):
        Layout.at(tmp_path).create()


def test_folders_are_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Layout.at(tmp_path / "above" / "stack").create()
    finally:
        os.umask(before)

    assert not (tmp_path / "above").stat().st_mode & 0o022
    assert not (tmp_path / "above" / "stack").stat().st_mode & 0o066


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_private_file_can_be_another_users(tmp_path: Path) -> None:
    write_private(tmp_path / "password", "secret", 65_534)

    found = (tmp_path / "password").stat()
    assert (found.st_uid, found.st_mode & 0o777) == (65_534, 0o600)
