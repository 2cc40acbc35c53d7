"""Logs (one JSON line each, never a prompt or a secret) and every metric of the three services."""

import logging
import re
import sys

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server
from prometheus_client.registry import Collector
from structlog.typing import EventDict

# Waits reach from milliseconds on an idle farm to an hour, where the queue deadline ends them.
_WAIT_BUCKETS = (0.05, 0.25, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
# A stage takes milliseconds with the tiny checkpoints and over an hour for 720p on a slow GPU.
_STAGE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)

submitted = Counter("latentmill_jobs_submitted_total", "Accepted jobs.", ["model"])
refused = Counter("latentmill_requests_refused_total", "Requests that got an error, by its code.", ["code"])
submit_flush = Histogram(
    "latentmill_submit_flush_jobs",
    "Jobs that one commit of the submit path took.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
)
sockets = Gauge("latentmill_progress_streams", "Open WebSockets and SSE streams.", ["kind"])
events_dropped = Counter("latentmill_progress_dropped_total", "Progress events not sent to a reader that was too slow.")

released = Counter("latentmill_jobs_released_total", "Tickets that the dispatcher sent.", ["model"])
queued = Gauge("latentmill_jobs_queued", "Jobs that wait, by whether their ticket is out.", ["model", "released"])
oldest_queued = Gauge("latentmill_oldest_queued_seconds", "Age of the job that has waited longest.", ["model"])
window_size = Gauge("latentmill_release_window_jobs", "Tickets that may be out; -1 means no bound.", ["model"])
leading = Gauge("latentmill_dispatcher_leading", "1 in the process that leads.")
lease_expiries = Counter("latentmill_lease_expiries_total", "Running jobs whose worker was lost.", ["model"])
tickets_lost = Counter(
    "latentmill_tickets_lost_total", "Releases taken back because their ticket was missing.", ["model"]
)

finished = Counter("latentmill_jobs_finished_total", "Ended jobs.", ["model", "outcome"])
queue_wait = Histogram("latentmill_queue_wait_seconds", "From submit to claim.", ["model"], buckets=_WAIT_BUCKETS)
stage = Histogram("latentmill_stage_seconds", "Run time of a job by stage.", ["model", "stage"], buckets=_STAGE_BUCKETS)
batch_size = Histogram(
    "latentmill_batch_jobs", "Jobs in one pipeline call.", ["model"], buckets=(1, 2, 3, 4, 6, 8, 16, 32, 64)
)
batch_fill = Histogram(
    "latentmill_batch_fill_ratio",
    "Jobs in a call over the most it could take.",
    ["model"],
    buckets=(0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
)
ticket_noops = Counter("latentmill_ticket_noops_total", "Tickets whose job could not be claimed.", ["model"])
tickets_bad = Counter("latentmill_tickets_bad_total", "Messages that were not tickets.")
attempts_failed = Counter("latentmill_attempts_failed_total", "Attempts without a result.", ["model", "error_class"])
stale_completions = Counter("latentmill_stale_completions_total", "Results refused by the fence.", ["model"])
engine_busy = Counter("latentmill_engine_busy_seconds_total", "Time in which the engine had a batch.", ["model"])
engine_restarts = Counter("latentmill_engine_restarts_total", "Engine children replaced.", ["reason"])
gpu_utilization = Gauge("latentmill_gpu_utilization_ratio", "Use of the GPU (NVML).", ["gpu"])
gpu_memory = Gauge("latentmill_gpu_memory_bytes", "Memory of the GPU (NVML).", ["gpu", "kind"])
worker_up = Gauge("latentmill_worker_accepting", "1 while the worker takes new jobs.", ["model"])
breaker_open = Gauge(
    "latentmill_worker_breaker_open",
    "1 while failures keep the worker from new jobs until a canary job succeeds.",
    ["model"],
)
spool_bytes = Gauge("latentmill_worker_spool_bytes", "Videos on this worker's disk that wait for their delivery.")
claims_direct = Counter(
    "latentmill_claims_direct_total", "Jobs claimed without a ticket, the broker being away.", ["model"]
)


# What each process shows. A gauge of another service would stand at zero there and say something untrue.
METRICS_OF: dict[str, tuple[Collector, ...]] = {
    "api": (submitted, refused, finished, submit_flush, sockets, events_dropped),
    "dispatcher": (
        released,
        queued,
        oldest_queued,
        window_size,
        leading,
        lease_expiries,
        tickets_lost,
        finished,
    ),
    "worker": (
        finished,
        queue_wait,
        stage,
        batch_size,
        batch_fill,
        ticket_noops,
        tickets_bad,
        attempts_failed,
        stale_completions,
        engine_busy,
        engine_restarts,
        gpu_utilization,
        gpu_memory,
        worker_up,
        breaker_open,
        spool_bytes,
        claims_direct,
    ),
}


# Postgres quotes the whole row that it refused, the prompt in it included.
_ROW_DETAIL = re.compile(r"DETAIL: .*")


def _without_row_details(_logger: object, _method: str, line: EventDict) -> EventDict:
    if isinstance(line.get("exception"), str):
        line["exception"] = _ROW_DETAIL.sub("DETAIL: left out", line["exception"])
    return line


def configure_logging(service: str) -> None:
    """Send every log line of this process to stderr as JSON, those of libraries included."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        lambda _logger, _method, line: {"service": service, **line},
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _without_row_details,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    render: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.JSONRenderer(),
    ]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=render))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # pika logs every step of every reconnect; the connections report their own state.
    logging.getLogger("pika").setLevel(logging.CRITICAL)


def serve_metrics(service: str, host: str, port: int) -> None:
    """Serve this service's /metrics on an internal address; port 0 turns it off."""
    if port:
        registry = CollectorRegistry()
        for metric in METRICS_OF[service]:
            registry.register(metric)
        ProcessCollector(registry=registry)
        start_http_server(port, addr=host, registry=registry)
