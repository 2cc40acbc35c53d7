"""Serve the API: `python -m api`. One process, one event loop; run more processes for more cores."""

import asyncio
import gc
import logging
import socket

import structlog
import uvicorn

from api.app import create_app
from api.hub import Hub
from api.routes.conversation import HEARTBEAT_S
from common.settings import ApiSettings, read
from common.telemetry import configure_logging, serve_metrics

# nginx closes idle connections to us after 4 s; ours must not be the end that closes one just as it is used.
_KEEP_ALIVE_S = 75
# Requests take milliseconds, and streams were told to end. What is left then is stuck.
_SHUTDOWN_S = 10
_MAX_MESSAGE_BYTES = 16 * 1024
# A burst of connections waits in the kernel rather than being refused; net.core.somaxconn caps it.
_BACKLOG = 4096


class _Server(uvicorn.Server):
    """A server that tells its streams to end before it waits for them."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then take what start-up made out of the collector's sight: a full pass would stall every request."""
        await super().startup(sockets=sockets)
        gc.collect()
        gc.freeze()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then what is left of the requests."""
        self._hub.close()
        await asyncio.sleep(0)  # their senders say goodbye themselves
        await super().shutdown(sockets=sockets)


def main() -> None:
    """Entry point."""
    configure_logging("api")
    settings = read(ApiSettings)
    app = create_app(settings)
    serve_metrics("api", settings.metrics_host, settings.metrics_port)
    config = uvicorn.Config(
        app,
        host=settings.api_host,
        port=settings.api_port,
        loop="uvloop",
        http="httptools",
        ws="websockets-sansio",
        ws_max_size=_MAX_MESSAGE_BYTES,
        ws_ping_interval=HEARTBEAT_S,
        ws_ping_timeout=HEARTBEAT_S,
        # Deflate costs 300 KiB a socket, and our frames are small.
        ws_per_message_deflate=False,
        access_log=False,
        log_config=None,
        proxy_headers=True,
        forwarded_allow_ips="127.0.0.1",
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    structlog.get_logger().info("api_started", host=settings.api_host, port=settings.api_port)
    _Server(config, app.state.resources.hub).run()


if __name__ == "__main__":
    main()
