"""Free loopback ports, chosen once per stack and remembered."""

import json
import random
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from infra.local.layout import write_private

# Below 32768, where Linux takes the ports of outgoing connections from. SeaweedFS also listens on each of its ports
# plus 10000, which must stay below that too.
LOWEST, HIGHEST = 10_000, 20_000
SHADOW = 10_000
TRIES = 1000


def is_free(port: int) -> bool:
    """Tell whether a server could listen on this port of 127.0.0.1 now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A server's own option: connections that linger from its last life do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def choose(taken: Iterable[int], free: Callable[[int], bool] = is_free) -> int:
    """Return a port that is free together with its shadow and not in `taken`.

    Raises OSError when none is found.
    """
    used = set(taken)
    for _ in range(TRIES):
        port = random.randrange(LOWEST, HIGHEST)  # noqa: S311 - a port is no secret
        if port not in used and free(port) and free(port + SHADOW):
            return port
    message = f"no free port between {LOWEST} and {HIGHEST}"
    raise OSError(message)


class PortBook:
    """The ports of one stack by name: chosen on the first ask, remembered in a file."""

    def __init__(self, path: Path, preferred: Mapping[str, int] | None = None) -> None:
        self._path = path
        self._preferred = preferred or {}
        self._ports: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}

    def __getitem__(self, name: str) -> int:
        """Return the port of this name."""
        if name not in self._ports:
            self._ports[name] = self._pick(name)
            write_private(self._path, json.dumps(self._ports, indent=1, sort_keys=True))
        return self._ports[name]

    def forget_taken(self, names: Iterable[str]) -> None:
        """Drop the ports that somebody else listens on by now; the next ask chooses anew."""
        for name in names:
            if name in self._ports and not is_free(self._ports[name]):
                del self._ports[name]

    def names(self) -> tuple[str, ...]:
        """Return every name that has a port."""
        return tuple(self._ports)

    def _pick(self, name: str) -> int:
        wish = self._preferred.get(name)
        if wish is not None and wish not in self._ports.values() and is_free(wish):
            return wish
        return choose(self._ports.values())
