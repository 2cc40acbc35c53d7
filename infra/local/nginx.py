"""The part `nginx`: renders the templates of nginx/ for this machine."""

import os
import re
import resource
from collections.abc import Mapping
from signal import SIGQUIT

from infra.local import binaries, probes, process
from infra.local.layout import private_folder, write_private
from infra.local.options import REPOSITORY
from infra.local.part import Launch, Part
from infra.local.plan import BUCKET, Plan, server_environment

TEMPLATES = REPOSITORY / "nginx"
# tls.conf is for containers.
RENDERED = ("nginx.conf", "upstreams.conf", "front.conf", "edge.conf")
ACCESS_LOG = "nginx-access"
# Only ${UPPER_CASE} is ours: nginx's own $variables are lower case and stay, as in nginx/docker-entrypoint.sh.
VARIABLE = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")


def render(template: str, values: Mapping[str, str]) -> str:
    """Fill in the ${NAME}s of a template. Raises KeyError for one that has no value."""
    return VARIABLE.sub(lambda found: values[found[1]], template)


def server_lines(servers: str, parameters: str) -> str:
    """Return the lines of an upstream for `host:port weight=3, host:port backup`, `parameters` added to each."""
    return "\n".join(f"server {server.strip()} {parameters};" for server in servers.split(","))


def part(plan: Plan) -> Part:
    """Return the part. SIGQUIT lets answers in flight end; open WebSockets are cut when the grace is over."""
    port = plan.ports["nginx"]
    return Part(
        "nginx",
        lambda: _launch(plan),
        lambda: probes.answers_http(port, "/-/nginx"),
        stop_signal=SIGQUIT,
        grace_s=3,
    )


def _launch(plan: Plan) -> Launch:
    home = private_folder(plan.layout.data / "nginx")
    config = private_folder(plan.layout.config / "nginx")
    process.move_aside(plan.layout.log(ACCESS_LOG))
    values = template_values(plan)
    for name in RENDERED:
        template = (TEMPLATES / f"{name}.template").read_text(encoding="utf-8")
        write_private(config / name, render(template, values))
    directives = "daemon off;"
    if os.getuid() == 0:
        # nginx's children would become `nobody`, who cannot enter a stack that belongs to root.
        directives += " user root;"
    argv = (str(binaries.nginx()), f"-p{home}", f"-c{config / 'nginx.conf'}", "-estderr", f"-g{directives}")
    return Launch(argv, home, server_environment(home))


def template_values(plan: Plan) -> dict[str, str]:
    """Return what the templates are filled in with. The edge's secret is among it."""
    files = min(65_536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    ports = plan.ports
    apis = f"127.0.0.1:{ports['api-1']} weight=3, 127.0.0.1:{ports['api-2']} weight=1"
    return {
        "CONFIG_DIR": str(plan.layout.config / "nginx"),
        "RUN_DIR": str(plan.layout.data / "nginx"),
        "CACHE_DIR": str(plan.layout.data / "nginx" / "cache"),
        "CACHE_SIZE": "2g",
        "ACCESS_LOG": str(plan.layout.log(ACCESS_LOG)),
        "LISTEN": f"127.0.0.1:{ports['nginx']}",
        # An api restarts in about two seconds, and one that is away refuses at once.
        "API_LINES": server_lines(apis, "max_fails=2 fail_timeout=2s"),
        # With a single server, marking it as failed would only turn a hiccup into an outage.
        "S3_LINES": server_lines(f"127.0.0.1:{ports['s3']}", "max_fails=0"),
        "S3_BUCKET": BUCKET,
        "EDGE_SECRET": plan.credentials.edge,
        "OPEN_FILES": str(files),
        # Each connection of a client may hold one to an api as well, and cached files are open too.
        "WORKER_CONNECTIONS": str(min(16_384, files // 2)),
        "WORKER_PROCESSES": "2",
        # A load test of 1,000 submits a second from one address must pass, with room for its bursts.
        "SUBMIT_RATE": "2000r/s",
        "SUBMIT_BURST": "4000",
        "CONNECTIONS_PER_ADDRESS": str(plan.options.connections_per_address),
        # 1,000 submits at once from one address must pass, beside what it has open otherwise.
        "SUBMITS_PER_ADDRESS": str(plan.options.connections_per_address + 1000),
        # What only containers need: names that are asked for again, load balancers in front, HTTPS.
        "RESOLVER": "",
        "TRUSTED_LINES": "",
        "TLS_LINE": "",
    }
