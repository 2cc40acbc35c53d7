"""Where everything of one stack lies, and how its private files are written."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders and files under one stack directory."""

    root: Path

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
    def postgres_home(self) -> Path:
        """Holds the path of Postgres' folder when that had to lie elsewhere."""
        return self.root / "postgres-home"

    def log(self, part: str) -> Path:
        """Return the log of one part."""
        return self.logs / f"{part}.log"

    def create(self) -> None:
        """Make the folders, closed to everybody else."""
        self.root.mkdir(parents=True, exist_ok=True)
        # Root's Postgres runs as another user, who must pass through here to a folder of its own; nobody may list it.
        self.root.chmod(0o711 if os.getuid() == 0 else 0o700)
        for folder in (self.config, self.logs, self.records, self.spool):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.data.mkdir(mode=0o711, exist_ok=True)


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter; return it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only its owner can read, never leaving half of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).replace(path)
