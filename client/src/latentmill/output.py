"""What a person sees, on stderr, and what a program reads, on stdout."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import click
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from latentmill.errors import ApiError, ConnectionFailedError, LatentmillError
from latentmill.models import Document, Job
from latentmill.progress import Event

_PROMPT_CHARS = 40
_ID_CHARS = 12  # enough to tell jobs apart, and the line still fits into 80 columns
_ADVICE = {
    400: "correct the fields named above; `latentmill models` shows what each model takes",
    401: "set LATENTMILL_API_KEY, or name a file with the key by --api-key-file",
    403: "this API key may not do that; ask for one with the scope it needs",
    404: "check the id and the API key: another tenant's jobs are not visible; `latentmill list` shows yours",
    409: "`latentmill get ID` shows how the job ended",
    429: "wait a moment, or let earlier jobs finish",
}


def clean(text: object) -> str:
    """Text from elsewhere, without the control characters that would steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in str(text))


def say(text: str) -> None:
    """Tell a person something."""
    click.echo(clean(text), err=True)


def emit(document: Document) -> None:
    """Give a program one JSON document, on a line of its own and at once."""
    # On a terminal, characters that would steer it or turn its lines around are shown as escapes.
    click.echo(json.dumps(document, ensure_ascii=sys.stdout.isatty(), separators=(",", ":")))


def show(text: object) -> None:
    """Print a result of the server's on a line of its own."""
    click.echo(clean(text))


def seconds(value: float) -> str:
    """A duration for people: 8s, 3m05s, 1h02m."""
    whole = max(0, round(value))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def describe(job: Job) -> str:
    """Where a job is, in a few words."""
    if job.is_terminal:
        return f"{job.status}: {job.error.code}: {job.error.message}" if job.error else job.status
    parts = _waiting(job) if job.status == "queued" else _running(job)
    if job.cancel_requested:
        parts.append("cancel requested")
    return ", ".join(parts)


def _waiting(job: Job) -> list[str]:
    place = job.queue
    if place is None:
        return ["queued"]
    parts = ["queued", f"position {place.position}"]
    if place.est_start_s is not None:
        parts.append(f"starts in about {seconds(place.est_start_s)}")
    if place.note:
        parts.append(place.note)
    return parts


def _running(job: Job) -> list[str]:
    parts = [job.phase or job.status]
    if job.progress.steps:
        parts.append(f"step {job.progress.step}/{job.progress.steps}")
    if job.progress.eta_s is not None:
        parts.append(f"ETA {seconds(job.progress.eta_s)}")
    return parts


class Watcher(Protocol):
    """Shows events as they come."""

    def show(self, event: Event) -> None:
        """Show one event."""


class JsonLines:
    """Each event as it was received, for programs."""

    def show(self, event: Event) -> None:
        """Print the message of the server."""
        emit(event.raw)


@dataclass(slots=True)
class PlainLines:
    """A line for each change of status, phase, step or place in the queue, for logs and pipes."""

    _shown: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def show(self, event: Event) -> None:
        """Print what changed. A new ETA alone is no news."""
        for job in event.jobs:
            place = (job.queue.position, job.queue.note) if job.queue else None
            state = (job.status, job.phase, job.attempt, job.progress.step, place, job.cancel_requested)
            if self._shown.get(job.id) != state:
                self._shown[job.id] = state
                say(f"{job.id} {describe(job)}")


@dataclass(slots=True)
class ProgressBars:
    """A bar for each job, for terminals."""

    bars: Bars
    _tasks: dict[str, TaskID] = field(default_factory=dict)

    def show(self, event: Event) -> None:
        """Move the bars."""
        for job in event.jobs:
            if job.id not in self._tasks:
                self._tasks[job.id] = self.bars.add_task(clean(job.id)[:_ID_CHARS], total=100, note="")
            percent = 100 if job.status == "succeeded" else job.progress.percent
            self.bars.update(self._tasks[job.id], completed=percent, note=clean(describe(job)))


@dataclass(frozen=True, slots=True)
class Both:
    """Shows every event to a program on stdout and to a person on stderr."""

    for_program: Watcher
    for_person: Watcher

    def show(self, event: Event) -> None:
        """Show it twice."""
        self.for_program.show(event)
        self.for_person.show(event)


@contextmanager
def watcher(*, as_json: bool) -> Iterator[Watcher]:
    """People read stderr; with `as_json` a program reads stdout, too. One terminal for both gets the JSON alone."""
    if as_json and sys.stdout.isatty():
        yield JsonLines()
        return
    with _for_people() as display:
        yield Both(JsonLines(), display) if as_json else display


@contextmanager
def _for_people() -> Iterator[Watcher]:
    """Bars on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield PlainLines()
    else:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        with Bars(*columns, TextColumn("{task.fields[note]}", markup=False), console=Console(stderr=True)) as bars:
            yield ProgressBars(bars)


def print_job(job: Job) -> None:
    """All that a person wants to know about a job."""
    rows = {
        "id": job.id,
        "state": describe(job),
        "model": job.model,
        "attempt": job.attempt,
        "created": job.created_at,
        "finished": job.finished_at,
        **job.params,
        **{f"metadata.{key}": value for key, value in job.metadata.items()},
        "timings": " ".join(f"{stage}={value:.0f}ms" for stage, value in job.timings_ms.items() if value is not None),
        "url": job.result.url if job.result else None,
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        if value not in (None, ""):
            show(f"{name:<{width}}  {value}")


def print_jobs(jobs: Iterable[Job]) -> None:
    """Jobs as a table."""
    rows = ((job.id, describe(job), job.model, _ago(job), _short(job.params.get("prompt"))) for job in jobs)
    _print_table(("ID", "STATE", "MODEL", "CREATED", "PROMPT"), rows)


def print_models(models: Iterable[Document]) -> None:
    """Models as a table."""
    rows = (
        (str(model.get("id")), " ".join(map(str, model.get("sizes") or ())), _choices(model), str(model.get("title")))
        for model in models
    )
    _print_table(("MODEL", "SIZES", "FRAMES", "WHAT"), rows)


def _print_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = Table(*titles, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    # In a pipe nobody sees a line's end: nothing may be cut there.
    Console(width=None if sys.stdout.isatty() else 400).print(table)


def _choices(model: Document) -> str:
    choices, legal = model.get("frame_choices"), model.get("num_frames")
    if choices:
        return ", ".join(map(str, choices))
    return f"{legal['low']:g} to {legal['high']:g}, 4k+1" if isinstance(legal, dict) else ""


def _ago(job: Job) -> str:
    return f"{job.created_at:%Y-%m-%d %H:%M}" if job.created_at else ""


def _short(prompt: object) -> str:
    text = str(prompt or "")
    return text if len(text) <= _PROMPT_CHARS else f"{text[: _PROMPT_CHARS - 1]}…"


def report(error: LatentmillError, *, as_json: bool) -> None:
    """Tell what went wrong and what to do about it."""
    say(f"error: {error}")
    if isinstance(error, ApiError):
        for refused in error.fields:
            say(f"  {refused.field}: {refused.message}")
    if advice := _advice(error):
        say(f"hint: {advice}")
    if isinstance(error, ApiError) and error.request_id:
        say(f"request id: {error.request_id}")
    if as_json:
        emit(_as_document(error))


def _advice(error: LatentmillError) -> str | None:
    if isinstance(error, ConnectionFailedError):
        return _proxy_hint(error.url) or "is the server up? Name it by --url or LATENTMILL_URL"
    if not isinstance(error, ApiError):
        return None
    if error.retry_after_s is not None:
        return f"try again in {seconds(error.retry_after_s)}"
    return "try again in a moment; jobs go on" if error.is_server_fault else _ADVICE.get(error.status)


def _proxy_hint(url: str) -> str | None:
    """What to look at when requests to `url` go through a proxy that the environment names."""
    address = urlsplit(url)
    proxies = getproxies()
    scheme = address.scheme if address.scheme in proxies else "all"
    if scheme not in proxies or proxy_bypass(address.hostname or ""):
        return None
    # Without the user and password that a proxy's address may have.
    proxy = proxies[scheme].rpartition("@")[2].rpartition("//")[2]
    return (
        f"requests go through the proxy {proxy} ({scheme.upper()}_PROXY); does it reach the server? "
        f"If it shall not be asked, add {address.hostname} to NO_PROXY"
    )


def _as_document(error: LatentmillError) -> Document:
    document = {"object": "error", "type": type(error).__name__, "message": str(error)}
    if not isinstance(error, ApiError):
        return document
    fields = [{"field": refused.field, "message": refused.message} for refused in error.fields]
    return {**document, "status": error.status, "code": error.code, "errors": fields, "request_id": error.request_id}
