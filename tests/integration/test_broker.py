"""Tickets through the real RabbitMQ: what counts as published, and what a consumer does with what it gets."""

import asyncio
import json
import socket
import time
import uuid
from collections.abc import Callable, Iterator

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from common.broker.publisher import Publisher
from common.broker.topology import DEAD_QUEUE, declare_blocking, queue_name
from common.domain.tickets import Ticket
from common.settings import DispatcherSettings
from tests.integration.conftest import MODEL
from tests.integration.servers import Servers
from worker.consume import Delivery, TicketConsumer


def tickets(count: int, model: str = MODEL) -> list[Ticket]:
    return [Ticket(uuid.uuid4(), 1, model, "key") for _ in range(count)]


@pytest.fixture
def channel(settings: DispatcherSettings, empty_queues: None) -> Iterator[BlockingChannel]:
    with pika.BlockingConnection(pika.URLParameters(settings.amqp_url.get_secret_value())) as connection:
        yield connection.channel()


@pytest.fixture
def consumer(settings: DispatcherSettings, empty_queues: None) -> Iterator[TicketConsumer]:
    consumer = TicketConsumer(settings.amqp_url.get_secret_value(), MODEL, 4, "test")
    consumer.start()
    yield consumer
    consumer.stop()


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


def take(consumer: TicketConsumer, count: int) -> list[Delivery]:
    taken: list[Delivery] = []

    def enough() -> bool:
        taken.extend(consumer.take(count - len(taken), 0.0, 0.1))
        return len(taken) >= count

    assert eventually(enough)
    return taken


async def test_a_confirmed_ticket_is_in_the_queue(publisher: Publisher, empty_queues: None) -> None:
    assert await publisher.publish(tickets(3), 5.0) == [True] * 3
    assert await publisher.depth(MODEL) == 3


async def test_a_ticket_that_reaches_no_queue_is_not_published(publisher: Publisher, empty_queues: None) -> None:
    astray = tickets(1, "no-such-model")
    assert await publisher.publish([*tickets(1), *astray, *tickets(1)], 5.0) == [True, False, True]


async def test_publishing_nothing_is_no_error(publisher: Publisher) -> None:
    assert await publisher.publish([], 5.0) == []


async def test_without_a_connection_nothing_is_published_and_nobody_waits() -> None:
    publisher = Publisher("amqp://nobody:nothing@127.0.0.1:1/%2F", "away", [MODEL])
    assert await publisher.publish(tickets(2), 60.0) == [False, False]


async def test_the_publisher_comes_back_after_the_broker_closed_its_connection(
    publisher: Publisher, stack: Servers, empty_queues: None
) -> None:
    await asyncio.to_thread(stack.stop_part, "rabbitmq")
    assert await publisher.publish(tickets(1), 1.0) == [False]
    await asyncio.to_thread(stack.start_part, "rabbitmq")
    async with asyncio.timeout(30):
        while not publisher.connected:
            await asyncio.sleep(0.05)
    assert await publisher.publish(tickets(1), 5.0) == [True]


def publish_raw(channel: BlockingChannel, body: bytes) -> None:
    channel.basic_publish("", queue_name(MODEL), body)


def ticket_body(job_id: uuid.UUID) -> bytes:
    return json.dumps({"v": 1, "job": str(job_id), "seq": 1, "model": MODEL, "key": "k"}).encode()


def test_a_consumer_takes_no_more_than_its_prefetch(consumer: TicketConsumer, channel: BlockingChannel) -> None:
    for _ in range(6):
        publish_raw(channel, ticket_body(uuid.uuid4()))
    consumer.resume()
    assert len(take(consumer, 4)) == 4
    assert consumer.take(1, 0.0, 0.2) == []


def test_an_acknowledged_ticket_makes_room_for_the_next(consumer: TicketConsumer, channel: BlockingChannel) -> None:
    for _ in range(6):
        publish_raw(channel, ticket_body(uuid.uuid4()))
    consumer.resume()
    consumer.acknowledge(take(consumer, 4))
    assert len(take(consumer, 2)) == 2


def test_a_paused_consumer_leaves_tickets_to_others(consumer: TicketConsumer, channel: BlockingChannel) -> None:
    consumer.resume()
    publish_raw(channel, ticket_body(uuid.uuid4()))
    take(consumer, 1)
    consumer.pause()
    publish_raw(channel, ticket_body(uuid.uuid4()))
    assert consumer.take(1, 0.0, 0.3) == []
    assert channel.queue_declare(queue_name(MODEL), passive=True).method.message_count == 1


def test_what_is_no_ticket_goes_to_the_dead_queue_and_harms_nobody(
    consumer: TicketConsumer, channel: BlockingChannel
) -> None:
    consumer.resume()
    publish_raw(channel, b"\x80\x04not a ticket")
    publish_raw(channel, b"x" * 10_000)
    good = uuid.uuid4()
    publish_raw(channel, ticket_body(good))
    assert [delivery.ticket.job_id for delivery in take(consumer, 1)] == [good]
    assert eventually(lambda: channel.queue_declare(DEAD_QUEUE, passive=True).method.message_count == 2)


def test_tickets_in_hand_come_again_when_their_worker_leaves(
    settings: DispatcherSettings, channel: BlockingChannel
) -> None:
    job_id = uuid.uuid4()
    leaving, staying = (TicketConsumer(settings.amqp_url.get_secret_value(), MODEL, 4, name) for name in "ab")
    leaving.start()
    leaving.resume()
    publish_raw(channel, ticket_body(job_id))
    take(leaving, 1)
    leaving.stop()
    staying.start()
    staying.resume()
    assert [delivery.ticket.job_id for delivery in take(staying, 1)] == [job_id]
    staying.stop()


def test_a_consumer_survives_the_loss_of_its_queue(consumer: TicketConsumer, channel: BlockingChannel) -> None:
    consumer.resume()
    publish_raw(channel, ticket_body(uuid.uuid4()))
    take(consumer, 1)
    channel.queue_delete(queue_name(MODEL))

    def sent_again() -> bool:
        declare_blocking(channel, [MODEL])
        publish_raw(channel, ticket_body(uuid.uuid4()))
        return bool(consumer.take(1, 0.0, 0.5))

    assert eventually(sent_again, within_s=20)


def test_a_consumer_outlives_a_broker_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        consumer = TicketConsumer(f"amqp://a:b@127.0.0.1:{silent.getsockname()[1]}/%2F", MODEL, 1, "test")
        consumer._parameters.stack_timeout = 0.2  # noqa: SLF001  ten seconds would show nothing more
        consumer.start()
        for _ in range(2):
            silent.accept()
        assert consumer.alive
        consumer.stop()
