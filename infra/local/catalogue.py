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
    apis = [services.api(plan, name, {}) for name in services.APIS]
    workers = [services.worker(plan, f"worker-{number + 1}", {}) for number in range(plan.options.workers)]
    return [*services.tasks(plan), *apis, services.dispatcher(plan, "dispatcher", {}), *workers]


def parts(plan: Plan) -> list[Part]:
    """Return every part that the options ask for."""
    return [*servers(plan), *apps(plan)] if plan.options.apps else servers(plan)


def part(plan: Plan, name: str, environment: Mapping[str, str]) -> Part:
    """Return one part by name; `environment` is added to that of a process of latentmill's.

    A worker may have any number, and there may be further dispatchers: dispatcher-2 …. Raises StackError when there is
    no such part.
    """
    if services.WORKER.fullmatch(name):
        return services.worker(plan, name, environment)
    if services.DISPATCHER.fullmatch(name):
        return services.dispatcher(plan, name, environment)
    if name in services.APIS:
        return services.api(plan, name, environment)
    found = next((known for known in (*servers(plan), *apps(plan)) if known.name == name), None)
    if found is None:
        message = f"no part is named {name}"
        raise StackError(message)
    return found
