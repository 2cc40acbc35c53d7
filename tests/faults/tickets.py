"""The broker of a farm as a test sees it: tickets written and read past the product."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel

from common.broker.topology import DEAD_QUEUE, JOBS_EXCHANGE, queue_name
from common.domain.tickets import Ticket, encode_ticket
from tests.faults.clients import MODEL
from tests.faults.farm import Farm

QUEUE = queue_name(MODEL)


@contextlib.contextmanager
def channel(farm: Farm) -> Iterator[BlockingChannel]:
    """A channel of the test's own, past every proxy."""
    with pika.BlockingConnection(pika.URLParameters(farm.stack.environment["LATENTMILL_AMQP_URL"])) as connection:
        yield connection.channel()


def publish(farm: Farm, *bodies: bytes) -> None:
    """Put these bodies into the queue of the farm's model."""
    with channel(farm) as opened:
        for body in bodies:
            opened.basic_publish(JOBS_EXCHANGE, QUEUE, body)


def depth(farm: Farm, queue: str = QUEUE) -> int:
    """Messages that lie ready in a queue."""
    with channel(farm) as opened:
        return int(opened.queue_declare(queue, passive=True).method.message_count)


def dead(farm: Farm) -> int:
    """Messages in the dead-letter queue."""
    return depth(farm, DEAD_QUEUE)


def ticket_of(row: Any) -> bytes:
    """The ticket that the row's last release sent."""
    return encode_ticket(Ticket(row.id, row.dispatch_seq, row.model, row.batch_key))
