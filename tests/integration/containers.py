"""The servers in containers, with the images of docker-compose.yml: new ones for each test run.

They listen on fixed ports of 127.0.0.1, since a published port that Docker chose changes when its container restarts.
Passwords go in by environment or file, never in an argument.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from docker.errors import APIError, DockerException, NotFound
from docker.types import Ulimit
from testcontainers.core.container import DockerContainer
from testcontainers.core.labels import LABEL_SESSION_ID, SESSION_ID

from infra.local import probes
from infra.local.credentials import load_or_make
from infra.local.layout import Layout
from infra.local.options import StackOptions
from infra.local.part import StackError
from infra.local.plan import DATABASE, USER, Plan
from infra.local.ports import PortBook, is_free
from tests.conftest import REPOSITORY
from tests.integration.engine import engine, images

READY_POLL_S = 0.1
# RabbitMQ takes 6 s on two idle cores; a machine that is busy with other work takes several times as long.
READY_TIMEOUT_S = 120
GRACE_S = 30
# Another run may take a port between its choice and the start of the container.
PORT_TRIES = 3
TAIL_LINES = 25
# Erlang sizes tables by the limit of open files, which Docker may set to a thousand million. The tests open hundreds.
OPEN_FILES = 4096
# Like the compose stack's, apart from the user and the password.
BROKER_CONFIG = REPOSITORY / "infra/docker/rabbitmq.conf"


@dataclass(frozen=True, slots=True)
class Server:
    """What runs in one container. `port` is the one inside; `files` maps paths to what lies there before the start."""

    port: int
    ready: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    command: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict, repr=False)


class ContainerServers:
    """Postgres, RabbitMQ, Redis and SeaweedFS in a container each. Raises EngineError without a Docker engine."""

    def __init__(self) -> None:
        self._engine = engine()
        self._images = images()
        self._folder = TemporaryDirectory(prefix="latentmill-test-")
        self._plan = _plan(Path(self._folder.name))
        self._servers = _servers(self._plan)
        self._containers: dict[str, DockerContainer] = {}

    @property
    def environment(self) -> Mapping[str, str]:
        """The LATENTMILL_* variables that lead to the servers. They hold passwords."""
        return self._plan.environment()

    def start(self) -> None:
        """Start all containers, so that they come up side by side, and wait for each. Raises StackError."""
        for part in self._servers:
            self._launch(part)
        for part in self._servers:
            self._await_ready(part)

    def stop_part(self, name: str) -> None:
        """Stop one container gracefully; it is killed when its grace is over. It keeps its data and its port."""
        self._containers[name].get_wrapped_container().stop(timeout=GRACE_S)

    def start_part(self, name: str) -> None:
        """Start a container that was stopped and wait until it serves. Raises StackError."""
        try:
            self._containers[name].get_wrapped_container().start()
        except APIError as error:
            raise _refused(name, error) from error
        self._await_ready(name)

    def destroy(self) -> None:
        """Remove all containers with their volumes."""
        for container in self._containers.values():
            with suppress(NotFound):
                container.stop()
        # An interrupt may have come after Docker had made a container and before its name was known here.
        for left in self._engine.client.containers.list(
            all=True, filters={"label": f"{LABEL_SESSION_ID}={SESSION_ID}"}, ignore_removed=True
        ):
            left.remove(force=True, v=True)
        self._engine.client.close()
        self._folder.cleanup()

    def _launch(self, part: str) -> None:
        for tries_left in reversed(range(PORT_TRIES)):
            port = self._plan.ports[part]
            container = self._containers[part] = _container(self._images[part], self._servers[part], port)
            try:
                container.start()
            except DockerException as error:
                if not tries_left or is_free(port):
                    raise _refused(part, error) from error
            else:
                return
            container.stop()
            self._plan.ports.forget_taken([part])

    def _await_ready(self, part: str) -> None:
        container = self._containers[part].get_wrapped_container()
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._servers[part].ready():
            container.reload()
            if container.status == "exited" or time.monotonic() > deadline:
                tail = container.logs(tail=TAIL_LINES).decode(errors="replace")
                message = f"{part} does not serve, its container is {container.status}; the end of its log:\n{tail}"
                raise StackError(message)
            time.sleep(READY_POLL_S)


def _refused(part: str, error: DockerException) -> StackError:
    return StackError(f"the container of {part} cannot be started: {error}")


def _plan(folder: Path) -> Plan:
    """Ports, passwords and addresses, chosen as those of a local stack are."""
    ports = PortBook(folder / "ports.json")
    return Plan(Layout.at(folder), ports, load_or_make(folder / "credentials.json"), StackOptions(folder, apps=False))


def _container(image: str, server: Server, port: int) -> DockerContainer:
    container = DockerContainer(image).with_envs(**server.environment).with_command(list(server.command))
    container.with_kwargs(ulimits=[Ulimit(name="nofile", soft=OPEN_FILES, hard=OPEN_FILES)])
    # with_bind_ports knows no address, and would publish to the whole network.
    cast("dict[str, Any]", container.ports)[f"{server.port}/tcp"] = ("127.0.0.1", port)
    for path, content in server.files.items():
        container.with_copy_into_container(content.encode(), path)
    return container


def _servers(plan: Plan) -> dict[str, Server]:
    """What runs in each container, the slowest first."""
    return {"rabbitmq": _rabbitmq(plan), "s3": _seaweedfs(plan), "postgres": _postgres(plan), "redis": _redis(plan)}


def _rabbitmq(plan: Plan) -> Server:
    return Server(
        port=5672,
        ready=lambda: probes.answers_amqp(plan.ports["rabbitmq"]),
        environment={"RABBITMQ_DEFAULT_USER": USER, "RABBITMQ_DEFAULT_PASS": plan.credentials.rabbitmq},
        files={"/etc/rabbitmq/conf.d/20-latentmill.conf": BROKER_CONFIG.read_text(encoding="utf-8")},
    )


def _postgres(plan: Plan) -> Server:
    return Server(
        port=5432,
        # While it makes its data it answers on a socket inside alone.
        ready=lambda: probes.answers_postgres(plan.database_url()),
        environment={
            "POSTGRES_USER": USER,
            "POSTGRES_DB": DATABASE,
            "POSTGRES_PASSWORD": plan.credentials.postgres,
        },
        command=("postgres", "-c", "max_connections=200"),
    )


def _redis(plan: Plan) -> Server:
    config = "/etc/latentmill-redis.conf"
    return Server(
        port=6379,
        ready=lambda: probes.answers_redis(plan.ports["redis"], plan.credentials.redis),
        command=("redis-server", config, "--save", ""),
        files={config: f"requirepass {plan.credentials.redis}\n"},
    )


def _seaweedfs(plan: Plan) -> Server:
    secret = plan.credentials
    return Server(
        port=8333,
        ready=lambda: probes.answers_http(plan.ports["s3"], "/healthz"),
        environment={
            "AWS_ACCESS_KEY_ID": secret.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": secret.s3_secret_key,
            # Every user of this machine reaches the ports behind S3 at the container's own address.
            "WEED_JWT_SIGNING_KEY": secret.s3_volume_write,
            "WEED_JWT_SIGNING_READ_KEY": secret.s3_volume_read,
            "WEED_JWT_FILER_SIGNING_KEY": secret.s3_filer_write,
            "WEED_JWT_FILER_SIGNING_READ_KEY": secret.s3_filer_read,
            "GOMEMLIMIT": "256MiB",
            "GOGC": "50",
        },
        command=(
            "mini",
            "-dir=/data",
            "-ip=127.0.0.1",
            "-ip.bind=0.0.0.0",
            "-s3.port=8333",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-disableHttp",
            "-master.telemetry=false",
        ),
    )
