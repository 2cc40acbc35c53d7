"""The part `redis`: a Valkey server that keeps nothing, as progress and wake-ups are only hints."""

from infra.local import binaries, probes
from infra.local.layout import private_folder, write_private
from infra.local.part import Launch, Part
from infra.local.plan import Plan, server_environment

CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
protected-mode yes
daemonize no
dir "{folder}"
save ""
appendonly no
"""


def part(plan: Plan) -> Part:
    """Return the part."""
    port, password = plan.ports["redis"], plan.credentials.redis
    return Part("redis", lambda: _launch(plan), lambda: probes.answers_redis(port, password))


def _launch(plan: Plan) -> Launch:
    folder = private_folder(plan.layout.data / "redis")
    config = plan.layout.config / "redis.conf"
    write_private(config, CONFIG.format(port=plan.ports["redis"], password=plan.credentials.redis, folder=folder))
    return Launch((str(binaries.valkey()), str(config)), folder, server_environment(folder))
