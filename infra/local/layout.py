"""Where everything of one stack lies, and how its private files are written."""

import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from infra.local.options import DEFAULT_DIRECTORY
from infra.local.part import StackError

# What lies beside the stack in the checkout's own directory: the RabbitMQ that all stacks share, and stacks of tests.
NEIGHBOURS = ("rabbitmq", "rabbitmq.lock", "rabbitmq-fetch-*", "test-*")
MARKER = "A stack of latentmill lies here. `python -m infra.local down --destroy --dir DIRECTORY` removes it.\n"


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders and files under one stack directory."""

    root: Path

    @classmethod
    def at(cls, directory: Path) -> Self:
        """Return the layout of a directory. Links above it are followed, but it must not be one itself."""
        absolute = Path(os.path.normpath(directory.absolute()))
        return cls(absolute.parent.resolve() / absolute.name)

    @property
    def data(self) -> Path:
        """Data of the servers, one folder each."""
        return self.root / "data"

    @property
    def config(self) -> Path:
        """Rendered configuration, some of it secret."""
        return self.root / "config"

    @property
    def logs(self) -> Path:
        """One log per part."""
        return self.root / "logs"

    @property
    def records(self) -> Path:
        """Which process runs which part."""
        return self.root / "run"

    @property
    def spool(self) -> Path:
        """Finished videos that wait for their upload, one folder per worker."""
        return self.root / "spool"

    @property
    def ports(self) -> Path:
        """The ports that were chosen."""
        return self.root / "ports.json"

    @property
    def credentials(self) -> Path:
        """The passwords that were made."""
        return self.root / "credentials.json"

    @property
    def options(self) -> Path:
        """Which parts the last start asked for."""
        return self.root / "options.json"

    @property
    def api_key(self) -> Path:
        """The API key that was made for the person at this machine."""
        return self.root / "api-key"

    @property
    def postgres_place(self) -> Path:
        """Holds the path of the folder with Postgres' data and programs when that had to lie elsewhere."""
        return self.root / "postgres-place"

    @property
    def lock(self) -> Path:
        """Held by whoever starts or stops the stack."""
        return self.root / "lock"

    @property
    def marker(self) -> Path:
        """Says that this directory is a stack's: without it nothing here is touched."""
        return self.root / "latentmill-stack"

    def log(self, part: str) -> Path:
        """Return the log of one part."""
        return self.logs / f"{part}.log"

    def exists(self) -> bool:
        """Tell whether a stack lies here."""
        return self.marker.is_file()

    def create(self) -> None:
        """Make the folders, closed to everybody else.

        Raises StackError where the directory is not this user's alone or holds what is no stack's.
        """
        _make_folders(self.root)
        self._refuse_unsafe()
        if not self.exists():
            self._refuse_foreign()
            write_private(self.marker, MARKER)
        # Root's Postgres runs as another user, who must pass through here to a folder of its own; nobody may list it.
        self.root.chmod(0o711 if os.getuid() == 0 else 0o700)
        for folder in (self.config, self.logs, self.records, self.spool):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.data.mkdir(mode=0o711, exist_ok=True)

    def remove(self) -> None:
        """Remove what a stack made here, and the directory if nothing else is left in it."""
        # Last, so that a removal which was cut short can be asked for again.
        for entry in sorted(self._entries(), key=lambda entry: entry == self.marker):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        if not any(self.root.iterdir()):
            self.root.rmdir()

    def _entries(self) -> list[Path]:
        """Return what a stack makes here, and what write_private left of it when it was killed."""
        folders = (self.data, self.config, self.logs, self.records, self.spool)
        files = (self.ports, self.credentials, self.options, self.api_key, self.postgres_place, self.lock, self.marker)
        return [*folders, *files, *(left for file in files for left in self.root.glob(f".{file.name}.*"))]

    def _refuse_unsafe(self) -> None:
        """Raise StackError where another user could exchange what lies in the directory."""
        found = self.root.lstat()
        if not stat.S_ISDIR(found.st_mode):
            message = f"{self.root} is a link or a file: name the directory itself"
        elif found.st_uid != os.getuid():
            message = f"{self.root} belongs to another user: choose a directory of your own with --dir"
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            message = f"others may write to {self.root}, and passwords would lie there: run `chmod go-w {self.root}`"
        else:
            return
        raise StackError(message)

    def _refuse_foreign(self) -> None:
        """Raise StackError where something lies that no stack made."""
        known = set(self._entries()) if self.root == DEFAULT_DIRECTORY else set()
        neighbours = NEIGHBOURS if self.root == DEFAULT_DIRECTORY else ()
        for entry in sorted(self.root.iterdir()):
            if entry not in known and not any(entry.match(pattern) for pattern in neighbours):
                message = (
                    f"{self.root} is not empty and no stack ({entry.name} lies there, {self.marker.name} does not): "
                    "choose an empty or a new directory with --dir, or remove what lies there"
                )
                raise StackError(message)


def _make_folders(path: Path) -> None:
    """Make a folder and its parents, writable for their owner only whatever the umask says."""
    for folder in (*reversed(path.parents), path):
        if not os.path.lexists(folder):
            folder.mkdir(mode=0o755, exist_ok=True)


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter; return it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def write_private(path: Path, text: str, owner: int | None = None) -> None:
    """Replace a file by one that only its owner, a user id (None: the caller), can read; never leave half of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        if owner is not None:
            # By descriptor: by its name another file could be given away.
            os.fchown(descriptor, owner, -1)
        file.write(text)
    Path(name).replace(path)
