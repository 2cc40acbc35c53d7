"""Exchanges and queues, declared in one place by every process that connects."""

import asyncio
from typing import Any

import pika
from pika.channel import Channel

JOBS_EXCHANGE = "latentmill.jobs"
DEAD_EXCHANGE = "latentmill.dead"
DEAD_QUEUE = "latentmill.dead"

# Safety nets only, spelled out because their defaults differ between RabbitMQ 3.10 and 4.x (4.0: 20 deliveries and
# then the message is gone). A ticket is redelivered when its worker leaves; attempts are counted in Postgres.
_DELIVERY_LIMIT = 1000
# Far above any window. With reject-publish a runaway publisher gets a nack, and its jobs wait in Postgres.
_MAX_LENGTH = 1_000_000


def queue_name(model: str) -> str:
    """The queue of a model's tickets; also its routing key."""
    return f"jobs.{model}"


def queue_arguments() -> dict[str, Any]:
    """Arguments of a ticket queue. They cannot be changed on an existing queue: a new one needs a new name."""
    return {
        "x-queue-type": "quorum",
        "x-delivery-limit": _DELIVERY_LIMIT,
        "x-dead-letter-exchange": DEAD_EXCHANGE,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-max-length": _MAX_LENGTH,
    }


def connection_parameters(amqp_url: str, name: str) -> pika.URLParameters:
    """Parameters for one connection, named so that an operator finds it in the broker's list."""
    parameters = pika.URLParameters(amqp_url)
    parameters.heartbeat = 15  # the useful band is 5 to 20 s: a dead peer is noticed after two of them
    parameters.blocked_connection_timeout = 10  # during a broker's memory or disk alarm a publish would wait for ever
    parameters.socket_timeout = 5
    parameters.stack_timeout = 10
    parameters.client_properties = {"connection_name": name}
    return parameters


def declarations(models: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """The (method, arguments) that set up everything for these models, in order."""
    steps: list[tuple[str, dict[str, Any]]] = [
        ("exchange_declare", {"exchange": JOBS_EXCHANGE, "exchange_type": "direct", "durable": True}),
        ("exchange_declare", {"exchange": DEAD_EXCHANGE, "exchange_type": "fanout", "durable": True}),
        ("queue_declare", {"queue": DEAD_QUEUE, "durable": True, "arguments": {"x-queue-type": "quorum"}}),
        ("queue_bind", {"queue": DEAD_QUEUE, "exchange": DEAD_EXCHANGE}),
    ]
    for model in models:
        name = queue_name(model)
        steps.append(("queue_declare", {"queue": name, "durable": True, "arguments": queue_arguments()}))
        steps.append(("queue_bind", {"queue": name, "exchange": JOBS_EXCHANGE, "routing_key": name}))
    return steps


def declare_blocking(channel: Any, models: list[str]) -> None:  # noqa: ANN401  pika has no type for both of its channels
    """Declare everything on a blocking channel."""
    for method, arguments in declarations(models):
        getattr(channel, method)(**arguments)


async def declare_async(channel: Channel, models: list[str]) -> None:
    """Declare everything on an asyncio channel."""
    loop = asyncio.get_running_loop()
    for method, arguments in declarations(models):
        done: asyncio.Future[object] = loop.create_future()
        getattr(channel, method)(**arguments, callback=done.set_result)
        await done
