"""Which parts a stack has."""

from collections.abc import Mapping

from infra.local import nginx, postgres, rabbitmq, seaweedfs, services, valkey
from infra.local.part import Part, StackError
from infra.local.plan import Plan


def servers(plan: Plan) -> list[Part]:
    """Return the five servers and RabbitMQ's name server."""
    return [postgres.part(plan), valkey.part(plan), seaweedfs.part(plan), *rabbitmq.parts(plan), nginx.part(plan)]


def apps(plan: Plan) -> list[Part]:
    """Return latentmill's own parts, with the workers that the options ask for."""
    apis = [services.api(plan, name) for name in services.APIS]
    workers = [services.worker(plan, f"worker-{number + 1}", {}) for number in range(plan.options.workers)]
    return [*services.tasks(plan), *apis, services.dispatcher(plan), *workers]


def parts(plan: Plan) -> list[Part]:
    """Return every part that the options ask for."""
    return [*servers(plan), *apps(plan)] if plan.options.apps else servers(plan)


def part(plan: Plan, name: str, environment: Mapping[str, str]) -> Part:
    """Return one part by name, a worker with any number included; `environment` is added to a worker's.

    Raises StackError when there is no such part.
    """
    if services.WORKER.fullmatch(name):
        return services.worker(plan, name, environment)
    found = next((known for known in (*servers(plan), *apps(plan)) if known.name == name), None)
    if found is None:
        message = f"no part is named {name}"
        raise StackError(message)
    return found
