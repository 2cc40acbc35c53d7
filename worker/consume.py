"""Takes tickets from RabbitMQ on a thread of its own; nothing else may touch the connection.

Prefetch is the size of a batch. The consumer is paused while a batch runs, so that no ticket waits behind it.
"""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pika
import structlog
from pika.adapters.blocking_connection import BlockingChannel

from common import telemetry
from common.broker.topology import connection_parameters, declare_blocking, queue_name
from common.domain.tickets import BadTicketError, Ticket, decode_ticket

_RECONNECT_FIRST_S = 0.2
_RECONNECT_CAP_S = 5.0
_TURN_S = 0.5
# A consumer that gets nothing for so long asks whether tickets lie in the queue: pika says nothing when the broker
# has closed a channel or forgotten a consumer.
_SILENCE_S = 10.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Delivery:
    """A ticket in hand. It can be acknowledged only on the session that brought it."""

    ticket: Ticket
    tag: int
    session: int


class TicketConsumer:
    """Owns the connection and its thread. Public methods belong to the worker's main thread."""

    def __init__(self, amqp_url: str, model: str, prefetch: int, name: str) -> None:
        self._parameters = connection_parameters(amqp_url, f"worker {name}")
        self._model = model
        self._prefetch = prefetch
        self._inbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._wanted = False
        self._consuming = False
        self._stopping = False
        self._session = 0
        self._connection: pika.BlockingConnection | None = None
        self._channel: BlockingChannel | None = None
        self._heard_at = time.monotonic()
        self._lost_at: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="consume", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs. It never ends by itself; when it did, nothing would be taken any more."""
        return self._thread.is_alive()

    @property
    def away_s(self) -> float:
        """For how long there has been no connection to the broker; 0 while there is one."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else time.monotonic() - lost_at

    def start(self) -> None:
        """Connect in the background, and again whenever the connection is lost."""
        self._thread.start()

    def resume(self) -> None:
        """Take tickets."""
        with self._changed:
            self._wanted = True
        self._wake()

    def pause(self) -> None:
        """Take no more tickets. Returns once the broker has confirmed it, or the connection is gone."""
        with self._changed:
            self._wanted = False
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: not self._consuming, timeout=self._parameters.stack_timeout)

    def take(self, limit: int, fill_s: float, timeout_s: float) -> list[Delivery]:
        """Wait up to `timeout_s` for a first ticket, then up to `fill_s` for more, at most `limit` in all."""
        taken: list[Delivery] = []
        until = time.monotonic() + timeout_s
        while len(taken) < limit:
            with contextlib.suppress(queue.Empty):
                taken.append(self._inbox.get(timeout=max(0.0, until - time.monotonic())))
                if len(taken) == 1:
                    until = time.monotonic() + fill_s
                continue
            break
        return taken

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the broker that these tickets are dealt with. One from a lost session will come again, harmlessly."""
        connection, channel = self._connection, self._channel
        for delivery in deliveries:
            if connection is not None and channel is not None and delivery.session == self._session:
                with contextlib.suppress(pika.exceptions.AMQPError):
                    connection.add_callback_threadsafe(functools.partial(_acknowledge, channel, delivery.tag))

    def stop(self) -> None:
        """Leave: what is in hand and not acknowledged goes back to the queue with the channel."""
        self._stopping = True
        self._wake()
        if self._thread.is_alive():  # it may not have been started yet
            self._thread.join(timeout=self._parameters.stack_timeout)

    def _wake(self) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(pika.exceptions.AMQPError):
                connection.add_callback_threadsafe(lambda: None)

    # Everything below runs on the consumer's thread.

    def _run(self) -> None:
        delay = _RECONNECT_FIRST_S
        while not self._stopping:
            try:
                with self._open_session() as (connection, channel):
                    delay = _RECONNECT_FIRST_S
                    self._serve(connection, channel)
            except Exception as error:  # noqa: BLE001  the edge of the thread: pika has more errors than one base
                log.warning("broker_lost", error=type(error).__name__, detail=str(error))
                time.sleep(delay)
                delay = min(2 * delay, _RECONNECT_CAP_S)

    @contextlib.contextmanager
    def _open_session(self) -> Iterator[tuple[pika.BlockingConnection, BlockingChannel]]:
        connection = pika.BlockingConnection(self._parameters)
        try:
            channel = connection.channel()
            declare_blocking(channel, [self._model])
            channel.basic_qos(prefetch_count=self._prefetch)
            channel.add_on_cancel_callback(_on_cancelled_by_broker)
            self._session += 1
            self._connection, self._channel = connection, channel
            self._lost_at = None
            log.info("broker_connected", session=self._session)
            yield connection, channel
        finally:
            self._connection = self._channel = None
            self._lost_at = time.monotonic() if self._lost_at is None else self._lost_at
            self._drop_inbox()
            self._set_consuming(consuming=False)
            with contextlib.suppress(pika.exceptions.AMQPError, OSError):
                connection.close()

    def _serve(self, connection: pika.BlockingConnection, channel: BlockingChannel) -> None:
        tag: str | None = None
        while not self._stopping:
            if tag is None and self._begin_consuming():
                tag = channel.basic_consume(queue_name(self._model), self._on_message)
            elif tag is not None and not self._wanted:
                # pika returns what arrives during the cancel to the queue; that costs a delivery count, which is why
                # the limit of the queue is far above anything that happens here.
                channel.basic_cancel(tag)
                tag = None
                self._set_consuming(consuming=False)
            connection.process_data_events(time_limit=_TURN_S)
            if not channel.is_open:
                msg = "the broker closed the channel"
                raise ConnectionError(msg)
            if tag is not None:
                self._check_silence(channel)

    def _on_message(self, channel: BlockingChannel, method: Any, _properties: Any, body: bytes) -> None:  # noqa: ANN401
        self._heard_at = time.monotonic()
        try:
            ticket = decode_ticket(body)
        except BadTicketError as error:
            telemetry.tickets_bad.inc()
            log.warning("bad_ticket", error=str(error), bytes=len(body))
            channel.basic_reject(method.delivery_tag, requeue=False)
            return
        self._inbox.put(Delivery(ticket, method.delivery_tag, self._session))

    def _check_silence(self, channel: BlockingChannel) -> None:
        if time.monotonic() - self._heard_at < _SILENCE_S or not self._inbox.empty():
            return
        self._heard_at = time.monotonic()
        waiting = channel.queue_declare(queue_name(self._model), passive=True).method.message_count
        if waiting:
            msg = f"{waiting} tickets lie in the queue and none was delivered"
            raise ConnectionError(msg)

    def _drop_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()

    def _begin_consuming(self) -> bool:
        """Note, before the broker is asked, that tickets may come: a pause from now on waits for the end of that."""
        with self._changed:
            self._consuming = self._wanted
            self._heard_at = time.monotonic()
            return self._wanted

    def _set_consuming(self, *, consuming: bool) -> None:
        with self._changed:
            self._consuming = consuming
            self._changed.notify_all()


def _acknowledge(channel: BlockingChannel, tag: int) -> None:
    if channel.is_open:
        channel.basic_ack(tag)


def _on_cancelled_by_broker(_frame: Any) -> None:  # noqa: ANN401  pika's frames are untyped
    msg = "the broker cancelled the consumer: its queue is gone"
    raise ConnectionError(msg)
