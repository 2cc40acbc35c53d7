"""What each container may do, where it may reach, and what it gives away."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.compose.conftest import FirstVideo
from tests.compose.stack import CommandFailedError, ComposeStack, Container, docker, inspect

LISTENER_PORT = 8000
NO_CAPABILITY = 0
# Prints whether a connection can be made.
PROBE = """
import socket
try:
    socket.create_connection(("{address}", {port}), 3).close()
    print("reached")
except OSError as error:
    print("not reached:", error)
"""


@pytest.fixture(scope="module")
def containers(first_video: FirstVideo, stack: ComposeStack) -> list[Container]:
    return stack.containers()


@pytest.fixture(scope="module")
def all_containers(first_video: FirstVideo, stack: ComposeStack) -> list[Container]:
    """Those of the tasks of a start as well, which have ended."""
    return stack.containers(ended=True)


def _hosts(container: Container) -> Mapping[str, Any]:
    config: Mapping[str, Any] = container.facts["HostConfig"]
    return config


def _first_process(container: Container) -> dict[str, str]:
    """What the kernel says of the container's first process: it knows better than any configuration."""
    lines = docker("exec", container.id, "cat", "/proc/1/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_every_container_runs_as_another_user_than_root(containers: list[Container]) -> None:
    for container in containers:
        uids = _first_process(container)["Uid"].split()
        assert container.facts["Config"]["User"].split(":")[0] not in {"", "0", "root"}, container.name
        assert "0" not in uids, container.name


def test_no_process_of_any_container_runs_as_root(containers: list[Container]) -> None:
    for container in containers:
        rows = docker("top", container.id, "-eo", "pid,uid").splitlines()[1:]
        assert "0" not in {row.split()[1] for row in rows}, container.name


def test_every_container_has_a_read_only_root(all_containers: list[Container]) -> None:
    assert [c.name for c in all_containers if not _hosts(c)["ReadonlyRootfs"]] == []


def test_no_container_can_write_to_its_root(containers: list[Container]) -> None:
    for container in containers:
        with pytest.raises(CommandFailedError, match="Read-only file system"):
            docker("exec", container.id, "touch", "/probe")


def test_no_container_has_or_can_get_a_capability(all_containers: list[Container]) -> None:
    for container in all_containers:
        hosts = _hosts(container)
        assert (hosts["CapDrop"], hosts["CapAdd"], hosts["Privileged"]) == (["ALL"], None, False), container.name
        assert hosts["SecurityOpt"] == ["no-new-privileges:true"], container.name


def test_the_kernel_grants_no_container_a_capability(containers: list[Container]) -> None:
    for container in containers:
        status = _first_process(container)
        granted = {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
        assert {int(capabilities, 16) for capabilities in granted} == {NO_CAPABILITY}, container.name
        assert status["NoNewPrivs"] == "1", container.name


def test_every_container_has_limits_of_memory_processes_and_logs(all_containers: list[Container]) -> None:
    for container in all_containers:
        hosts = _hosts(container)
        assert hosts["Memory"], container.name
        assert hosts["PidsLimit"], container.name
        assert set(hosts["LogConfig"]["Config"]) == {"max-size", "max-file"}, container.name


def test_no_container_can_write_to_this_machine(all_containers: list[Container]) -> None:
    """Folders of the checkout are mounted read-only, and the engine's socket nowhere."""
    for container in all_containers:
        mounted = [mount for mount in container.facts["Mounts"] if mount["Type"] == "bind"]
        assert [mount["Source"] for mount in mounted if mount["RW"] or "docker.sock" in mount["Source"]] == []


def test_only_nginx_is_published_and_on_loopback_alone(containers: list[Container], stack: ComposeStack) -> None:
    published = {c.service: c.facts["NetworkSettings"]["Ports"] for c in containers}
    bound = {
        service: [binding for bindings in ports.values() for binding in bindings or ()]
        for service, ports in published.items()
    }
    assert {service: bindings for service, bindings in bound.items() if bindings} == {
        "nginx": [{"HostIp": "127.0.0.1", "HostPort": str(stack.port)}]
    }


def test_only_nginx_is_on_a_network_that_leads_out(containers: list[Container], stack: ComposeStack) -> None:
    names = {name for c in containers for name in c.facts["NetworkSettings"]["Networks"]}
    leading_out = {name for name in names if not json.loads(docker("network", "inspect", name))[0]["Internal"]}
    assert leading_out == {stack.network("public")}
    on_it = {c.service for c in containers if leading_out & set(c.facts["NetworkSettings"]["Networks"])}
    assert on_it == {"nginx"}


@contextmanager
def _listener(stack: ComposeStack, network: str) -> Iterator[str]:
    """The address of a container that listens on a network of the stack."""
    name = f"{stack.project}-listener"
    server = ["python", "-m", "http.server", str(LISTENER_PORT)]
    options = ["--detach", "--rm", f"--name={name}", f"--network={network}", "--entrypoint=", "--no-healthcheck"]
    docker("run", *options, "--workdir=/tmp", "latentmill/server", *server)
    try:
        yield inspect(name)[0].address_in(network)
    finally:
        docker("rm", "--force", name)


def test_a_worker_reaches_no_listener_on_another_network(first_video: FirstVideo, stack: ComposeStack) -> None:
    with _listener(stack, stack.network("public")) as address:
        # nginx is on that network: what it reaches is there to be reached.
        curl = ["curl", "--silent", "--show-error", "--fail", "--retry", "10", "--retry-connrefused"]
        stack.compose("exec", "-T", "nginx", *curl, "--max-time", "3", f"http://{address}:{LISTENER_PORT}/")
        told = stack.python("worker", PROBE.format(address=address, port=LISTENER_PORT))
    assert told.startswith("not reached")


def test_a_worker_reaches_a_listener_on_its_own_network(first_video: FirstVideo, stack: ComposeStack) -> None:
    """The probe above can succeed."""
    told = stack.python("worker", PROBE.format(address="postgres", port=5432))
    assert told.strip() == "reached"


def test_a_worker_has_no_route_out(first_video: FirstVideo, stack: ComposeStack) -> None:
    routes = stack.compose("exec", "-T", "worker", "cat", "/proc/net/route").splitlines()[1:]
    assert "00000000" not in {route.split()[1] for route in routes}


@pytest.fixture(scope="module")
def secrets(first_video: FirstVideo, stack: ComposeStack) -> list[str]:
    """Every password of the stack, and a key of its api."""
    volume = f"--volume={stack.volume('credentials-kept')}:/kept:ro"
    kept = json.loads(docker("run", "--rm", volume, "latentmill/server", "cat", "/kept/credentials.json"))
    return [*kept.values(), stack.api_key]


def _holds_one(text: str, secrets: list[str]) -> bool:
    return any(secret in text for secret in secrets)


def test_no_secret_can_be_read_by_docker_inspect(all_containers: list[Container], secrets: list[str]) -> None:
    assert len(secrets) > 10
    assert [c.name for c in all_containers if _holds_one(json.dumps(c.facts), secrets)] == []


def test_no_secret_is_an_argument_of_any_process(containers: list[Container], secrets: list[str]) -> None:
    arguments = {c.name: docker("top", c.id, "-eo", "pid,args") for c in containers}
    assert [name for name, text in arguments.items() if _holds_one(text, secrets)] == []


def test_no_secret_is_in_any_log(first_video: FirstVideo, stack: ComposeStack, secrets: list[str]) -> None:
    logs = stack.logs()
    assert len(logs.splitlines()) > 20
    assert not _holds_one(logs, secrets)
