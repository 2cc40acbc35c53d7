"""The parts `epmd` and `rabbitmq`. Erlang's name server is a part of its own because a broker leaves its own behind."""

import os
import subprocess
from pathlib import Path

from infra.local import binaries, probes
from infra.local.debian import fetched_server
from infra.local.layout import private_folder, write_private
from infra.local.options import DEFAULT_DIRECTORY
from infra.local.part import Launch, Part, StackError
from infra.local.plan import USER, Plan, server_environment

# Shared by all stacks of this checkout: unpacking takes 6 s and 100 MB.
FETCHED = DEFAULT_DIRECTORY / "rabbitmq"

LOOPBACK_ONLY = "-kernel inet_dist_use_interface {127,0,0,1}"
CONTROL_TIMEOUT_S = 60

CONFIG = """\
listeners.tcp.1 = 127.0.0.1:{port}
default_user = {user}
default_pass = {password}
default_user_tags.administrator = true
log.console = true
log.console.level = info
log.file = false
# The broker holds a small window of tickets of 300 bytes; the default blocks publishers on a nearly full laptop.
disk_free_limit.absolute = 64MB
"""


def parts(plan: Plan) -> tuple[Part, Part]:
    """Return both parts."""
    port, names_port = plan.ports["rabbitmq"], plan.ports["epmd"]
    return (
        # The first start of all may download RabbitMQ, which sets its own limit.
        Part("epmd", lambda: _launch_epmd(plan), lambda: probes.answers_tcp(names_port)),
        # 5 s on two idle cores; a machine that compiles or starts other brokers meanwhile takes several times as long.
        Part("rabbitmq", lambda: _launch(plan), lambda: probes.answers_amqp(port), needs=("epmd",), timeout_s=120),
    )


def control(plan: Plan, arguments: tuple[str, ...]) -> str:
    """Run `rabbitmqctl` against this stack's broker; return what it prints. It takes one to two seconds of a core.

    Raises StackError when it fails or takes longer than a minute.
    """
    server = _server()
    environment = _environment(plan, server, plan.layout.data / "rabbitmq")
    # The tool is an Erlang node of its own, and must listen on loopback alone as well.
    environment["RABBITMQ_CTL_ERL_ARGS"] = LOOPBACK_ONLY
    argv = (str(server.with_name("rabbitmqctl")), "--quiet", *arguments)
    try:
        done = subprocess.run(  # noqa: S603 - the stack's own command
            argv, env=environment, capture_output=True, text=True, timeout=CONTROL_TIMEOUT_S, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        message = f"rabbitmq: `rabbitmqctl {arguments[0]}` failed: {error}\n{error.stderr or error.stdout or ''}"
        raise StackError(message) from error
    return done.stdout


def _server() -> Path:
    return binaries.rabbitmq_server() or fetched_server(FETCHED)


def _launch_epmd(plan: Plan) -> Launch:
    server = _server()
    home = private_folder(plan.layout.data / "rabbitmq")
    environment = _environment(plan, server, home)
    epmd = next((path for path in _programs(environment, "epmd")), "epmd")
    return Launch((epmd, "-port", str(plan.ports["epmd"]), "-address", "127.0.0.1"), home, environment)


def _programs(environment: dict[str, str], name: str) -> list[str]:
    folders = environment["PATH"].split(os.pathsep)
    return [path for folder in folders if os.access(path := str(Path(folder) / name), os.X_OK)]


def _launch(plan: Plan) -> Launch:
    server = _server()
    home = private_folder(plan.layout.data / "rabbitmq")
    config = plan.layout.config
    write_private(
        config / "rabbitmq.conf",
        CONFIG.format(port=plan.ports["rabbitmq"], user=USER, password=plan.credentials.rabbitmq),
    )
    for name in ("advanced.config", "enabled_plugins"):
        write_private(config / name, "[].\n")
    write_private(home / ".erlang.cookie", plan.credentials.erlang_cookie)
    return Launch((str(server),), home, _environment(plan, server, home))


def _environment(plan: Plan, server: Path, home: Path) -> dict[str, str]:
    config = plan.layout.config
    return (
        server_environment(home)
        | _erlang(server)
        | {
            "RABBITMQ_NODENAME": f"{USER}@localhost",
            "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
            "RABBITMQ_LOG_BASE": str(home / "log"),
            "RABBITMQ_CONFIG_FILE": str(config / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(config / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(config / "enabled_plugins"),
            # Keeps a system-wide /etc/rabbitmq/rabbitmq-env.conf out.
            "RABBITMQ_CONF_ENV_FILE": str(config / "rabbitmq-env.conf"),
            "RABBITMQ_DIST_PORT": str(plan.ports["rabbitmq.dist"]),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": LOOPBACK_ONLY,
            "ERL_EPMD_PORT": str(plan.ports["epmd"]),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            # The start script then becomes the broker instead of watching over it, so signals and waits reach it.
            "RUNNING_UNDER_SYSTEMD": "true",
        }
    )


def _erlang(server: Path) -> dict[str, str]:
    """Return what an unpacked Erlang needs: it was built for /usr/lib/erlang."""
    if FETCHED not in server.parents:
        return {}
    path = os.pathsep.join((str(FETCHED / "usr/bin"), os.environ.get("PATH", os.defpath)))
    return {"PATH": path, "ERL_ROOTDIR": str(FETCHED / "usr/lib/erlang")}
