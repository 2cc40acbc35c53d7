"""Publishes tickets from an event loop and says of each whether the broker has it.

A ticket counts as published only when the broker confirmed it and did not return it: without `mandatory` a broker
confirms what it throws away, and a returned message is confirmed right after its return.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pika
import structlog
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.channel import Channel

from common.broker.topology import JOBS_EXCHANGE, connection_parameters, declare_async, queue_name
from common.domain.tickets import Ticket, encode_ticket

_RECONNECT_FIRST_S = 0.2
_RECONNECT_CAP_S = 5.0  # a broker that is back should be used again within seconds
_CONNECT_TIMEOUT_S = 10.0

log = structlog.get_logger()


@dataclass(slots=True)
class _Session:
    """One open channel in confirm mode. `unconfirmed` maps delivery tags to the waiting publishes."""

    connection: AsyncioConnection
    channel: Channel
    next_tag: int = 1
    unconfirmed: dict[int, tuple[str, asyncio.Future[bool]]] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)

    def settle(self, frame: Any) -> None:  # noqa: ANN401  pika's frames are untyped
        """Answer the publishes that an ack or nack speaks about; `multiple` means all up to its tag."""
        accepted = isinstance(frame.method, pika.spec.Basic.Ack)
        last = frame.method.delivery_tag
        tags = [tag for tag in self.unconfirmed if tag <= last] if frame.method.multiple else [last]
        for tag in tags:
            message_id, done = self.unconfirmed.pop(tag, ("", None))
            if done is not None and not done.done():
                done.set_result(accepted and message_id not in self.returned)
            self.returned.discard(message_id)

    def fail_all(self) -> None:
        """The channel is gone: nothing is known of what was under way, and not knowing counts as unpublished."""
        for _, done in self.unconfirmed.values():
            if not done.done():
                done.set_result(False)
        self.unconfirmed.clear()


class Publisher:
    """Keeps one connection to the broker open for as long as `run` runs. All methods belong to one event loop."""

    def __init__(self, amqp_url: str, name: str, models: list[str]) -> None:
        self._url = amqp_url
        self._name = name
        self._models = models
        self._session: _Session | None = None
        self._lost = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether a publish would be tried right now."""
        return self._session is not None

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost, until cancelled."""
        delay = _RECONNECT_FIRST_S
        while True:
            try:
                self._lost.clear()
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    self._session = await self._open()
                log.info("broker_connected", connection=self._name)
                delay = _RECONNECT_FIRST_S
                await self._lost.wait()
            except (pika.exceptions.AMQPError, OSError, TimeoutError) as error:
                log.warning("broker_unreachable", connection=self._name, error=type(error).__name__)
            finally:
                self._drop_session()
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RECONNECT_CAP_S)

    async def publish(self, tickets: Sequence[Ticket], timeout_s: float) -> list[bool]:
        """Publish all tickets; for each, whether the broker has safely got it. Takes at most `timeout_s` seconds."""
        session = self._session
        if not tickets or session is None or not session.channel.is_open:
            return [False] * len(tickets)
        waiting = [self._send(session, ticket) for ticket in tickets]
        await asyncio.wait(waiting, timeout=timeout_s)
        return [done.done() and done.result() for done in waiting]

    async def depth(self, model: str) -> int | None:
        """Tickets of the model that lie ready in the broker, or None when it cannot be asked."""
        session = self._session
        if session is None:
            return None
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            session.channel.queue_declare(queue_name(model), passive=True, callback=answer.set_result)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                return int((await answer).method.message_count)
        except (pika.exceptions.AMQPError, TimeoutError):
            return None

    def _send(self, session: _Session, ticket: Ticket) -> asyncio.Future[bool]:
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        session.unconfirmed[session.next_tag] = (ticket.message_id, done)
        session.next_tag += 1
        properties = pika.BasicProperties(
            message_id=ticket.message_id, delivery_mode=pika.DeliveryMode.Persistent, content_type="application/json"
        )
        try:
            session.channel.basic_publish(
                JOBS_EXCHANGE, queue_name(ticket.model), encode_ticket(ticket), properties, mandatory=True
            )
        except pika.exceptions.AMQPError:
            self._lost.set()
        return done

    async def _open(self) -> _Session:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[AsyncioConnection] = loop.create_future()
        connection = AsyncioConnection(
            connection_parameters(self._url, self._name),
            on_open_callback=lambda conn: _resolve(opened, conn),
            on_open_error_callback=lambda _, error: _reject(opened, error),
            on_close_callback=lambda *_: self._lost.set(),
        )
        try:
            await opened
            channel = await self._open_channel(connection)
            session = _Session(connection, channel)
            channel.add_on_return_callback(lambda _c, _m, properties, _b: session.returned.add(properties.message_id))
            ready: asyncio.Future[Any] = loop.create_future()
            channel.confirm_delivery(session.settle, callback=lambda frame: _resolve(ready, frame))
            await ready
        except BaseException:
            _close(connection)
            raise
        return session

    async def _open_channel(self, connection: AsyncioConnection) -> Channel:
        opened: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        connection.channel(on_open_callback=lambda channel: _resolve(opened, channel))
        channel = await opened
        channel.add_on_close_callback(lambda *_: self._lost.set())
        await declare_async(channel, self._models)
        return channel

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.fail_all()
            _close(session.connection)


def _resolve(future: asyncio.Future[Any], value: Any) -> None:  # noqa: ANN401  one callback for several frame types
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: BaseException | str) -> None:
    if not future.done():
        future.set_exception(error if isinstance(error, BaseException) else ConnectionError(error))


def _close(connection: AsyncioConnection) -> None:
    with contextlib.suppress(pika.exceptions.AMQPError):
        if not (connection.is_closing or connection.is_closed):
            connection.close()
