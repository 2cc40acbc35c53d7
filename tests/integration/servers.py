"""Which servers the tests run on. LATENTMILL_TEST_SERVERS chooses: `local`, the default, or `containers`."""

import os
from collections.abc import Callable, Mapping
from typing import Protocol

from infra.local.options import StackOptions
from infra.local.stack import LocalStack
from tests.conftest import stack_directory
from tests.integration.containers import ContainerServers

CHOICE = "LATENTMILL_TEST_SERVERS"


class Servers(Protocol):
    """Real servers of this test run alone. Their parts: postgres, rabbitmq, redis, s3."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The LATENTMILL_* variables that lead to them. They stay when a part is stopped and started."""
        ...

    def start(self) -> None:
        """Start all of them and wait until each serves."""
        ...

    def stop_part(self, name: str) -> None:
        """Stop one gracefully. Its data stays."""
        ...

    def start_part(self, name: str) -> None:
        """Start one that was stopped and wait until it serves."""
        ...

    def destroy(self) -> None:
        """Stop all of them and remove their data, also after a start that failed."""
        ...


def _local() -> Servers:
    return LocalStack(StackOptions(directory=stack_directory("servers"), apps=False))


KINDS: Mapping[str, Callable[[], Servers]] = {"local": _local, "containers": ContainerServers}


def chosen_servers(environment: Mapping[str, str] = os.environ) -> Servers:
    """The servers that the variable names, not started yet.

    Raises ValueError when it names none, EngineError when no Docker engine answers.
    """
    kind = environment.get(CHOICE) or "local"
    if kind not in KINDS:
        message = f"{CHOICE} is {kind!r}, which is none of: {', '.join(KINDS)}"
        raise ValueError(message)
    return KINDS[kind]()
