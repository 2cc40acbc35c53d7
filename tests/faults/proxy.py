"""A TCP proxy that goes wrong on request, so that a fault lies between one kind of process and one server.

It runs on a thread of its own. What it does now is a `Weather`, a value that a test replaces; connections that are open
feel the change at once.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

_CHUNK_BYTES = 65_536
# How often a held connection looks whether the weather has changed.
_LOOK_S = 0.02
# Postgres has done a statement, its commit included, when it says that it is ready for the next one.
READY_FOR_QUERY = b"Z\x00\x00\x00\x05"


@dataclass(frozen=True, slots=True)
class CutReply:
    """Once a request holds `asked`, its reply is dropped when it holds `answered`, and the connection is reset.

    The server has done the work by then. `instead` is sent to the client before the end. `times` requests meet this.
    """

    asked: bytes
    answered: bytes = b""
    instead: bytes = b""
    times: int = 1


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to the bytes of all connections.

    delay_s: added to each chunk. bytes_per_s: of each connection and direction. swallowed: nothing arrives any more and
    nobody is told, as with a cut cable. refused: connections are reset, open ones and new ones. rewrite: what a reply
    holds is exchanged for something of the same length.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    swallowed: bool = False
    refused: bool = False
    rewrite: tuple[bytes, bytes] | None = None
    cut: CutReply | None = None


FAIR = Weather()


@dataclass(slots=True, eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    cutting: bool = False
    held: bytearray = field(default_factory=bytearray)

    def reset(self) -> None:
        for writer in (self.client, self.server):
            _reset(writer)


class FaultProxy:
    """Listens on a port of 127.0.0.1 and passes connections on to the port that `target` names at that moment."""

    def __init__(self, name: str, target: Callable[[], int]) -> None:
        self.name = name
        self._target = target
        self._weather = FAIR
        self._cuts_left = 0
        self._open: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy {name}", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def cuts_done(self) -> int:
        """How many replies were cut since the weather changed."""
        return self._weather.cut.times - self._cuts_left if self._weather.cut else 0

    def set(self, weather: Weather) -> None:
        """Let this happen from now on. Refused resets what is open."""
        self._call(self._set(weather))

    def break_connections(self) -> None:
        """Reset every open connection; new ones are served."""
        self._call(self._break())

    @contextlib.contextmanager
    def under(self, weather: Weather) -> Iterator[None]:
        """Let this happen for a while."""
        self.set(weather)
        try:
            yield
        finally:
            self.set(FAIR)

    def close(self) -> None:
        """End everything."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    # Everything below runs on the proxy's thread.

    async def _set(self, weather: Weather) -> None:
        self._weather = weather
        self._cuts_left = weather.cut.times if weather.cut else 0
        if weather.refused:
            await self._break()

    async def _break(self) -> None:
        for connection in tuple(self._open):
            connection.reset()

    async def _end(self) -> None:
        self._server.close()
        await self._break()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self._weather.refused:
            _reset(client)
            return
        try:
            server_reader, server = await asyncio.open_connection("127.0.0.1", self._target())
        except OSError:
            _reset(client)
            return
        connection = _Connection(client, server)
        self._open.add(connection)
        pumps = (
            self._pump(connection, client_reader, server, self._on_request),
            self._pump(connection, server_reader, client, self._on_reply),
        )
        try:
            await asyncio.gather(*pumps)
        except asyncio.CancelledError:  # the end of the proxy, of which asyncio's server would complain
            pass
        finally:
            self._open.discard(connection)
            connection.reset()

    async def _pump(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        look: Callable[[_Connection, bytes], bytes | None],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._hold(len(data))
                passed = look(connection, data)
                if passed is None:
                    connection.reset()
                    return
                writer.write(passed)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    async def _hold(self, size: int) -> None:
        """Wait as the weather demands. What a cut cable holds arrives when it is mended, as TCP's repeats would."""
        while self._weather.swallowed:
            await asyncio.sleep(_LOOK_S)
        weather = self._weather
        if weather.delay_s:
            await asyncio.sleep(weather.delay_s)
        if weather.bytes_per_s:
            await asyncio.sleep(size / weather.bytes_per_s)

    def _on_request(self, connection: _Connection, data: bytes) -> bytes:
        cut = self._weather.cut
        if cut is not None and self._cuts_left > 0 and cut.asked in data:
            self._cuts_left -= 1
            connection.cutting = True
        return data

    def _on_reply(self, connection: _Connection, data: bytes) -> bytes | None:
        weather = self._weather
        if connection.cutting and weather.cut is not None:
            connection.held += data
            if weather.cut.answered not in connection.held:
                return b""
            if weather.cut.instead:
                connection.client.write(weather.cut.instead)
            return None
        return data.replace(*weather.rewrite) if weather.rewrite else data


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST where nothing waits to be written: the peer learns at once, and no port lingers."""
    peer = writer.get_extra_info("socket")
    if peer is not None and not writer.transport.is_closing():
        if not writer.transport.get_write_buffer_size():
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
