"""What the code knows about itself, as Markdown: states, retries, settings, errors, metrics, models, decisions."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from common import telemetry
from common.domain import jobs
from common.domain.errors import CATALOGUE
from common.domain.profiles import PROFILES, ModelProfile, Range
from common.settings import (
    ApiSettings,
    BrokerSettings,
    DatabaseSettings,
    DispatcherSettings,
    EventSettings,
    StorageSettings,
    WorkerSettings,
)
from docs.tables import code, table

SERVICES: dict[str, type[BaseModel]] = {"api": ApiSettings, "dispatcher": DispatcherSettings, "worker": WorkerSettings}
_SHARED: dict[str, type[BaseModel]] = {
    "Postgres": DatabaseSettings,
    "RabbitMQ": BrokerSettings,
    "Redis": EventSettings,
    "S3 and result addresses": StorageSettings,
}
# The codes that common.db.statements writes by itself; a test compares them with its SQL.
CODES_OF_STATEMENTS = {
    "cancelled": "Somebody cancelled the job. Its status is `cancelled`.",
    "queue_deadline_exceeded": "No worker started the job in time. Its status is `expired`.",
    "deadline_exceeded": "The job was not done by its total deadline. Its status is `failed`.",
}
_MEANING = {
    jobs.ErrorClass.INVALID_INPUT: "the engine refuses the parameters or the image",
    jobs.ErrorClass.OOM: "the job does not fit into the GPU's memory",
    jobs.ErrorClass.INFRASTRUCTURE: "the video could not be encoded or written to the disk",
    jobs.ErrorClass.CHILD_CRASH: "the engine's process died",
    jobs.ErrorClass.WORKER_LOST: "the worker stopped renewing its lease",
    jobs.ErrorClass.PREEMPTED: "the worker was asked to leave",
    jobs.ErrorClass.TIMEOUT: "no progress for too long, or the attempt overran its deadline",
    jobs.ErrorClass.NAN_OUTPUT: "the latents were not finite numbers",
    jobs.ErrorClass.INTERNAL: "an exception of latentmill's own",
}


def state_diagram() -> str:
    """The state graph as a Mermaid diagram."""
    lines = ["    [*] --> queued"]
    lines += [f"    {state} --> {following}" for state, following in _moves()]
    lines += [f"    {state} --> [*]" for state in jobs.JobState if state in jobs.TERMINAL_STATES]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def moves() -> str:
    """The allowed moves in words, for readers without a Mermaid renderer."""
    rows = [
        (code(state), ", ".join(code(following) for following in jobs.JobState if following in jobs.TRANSITIONS[state]))
        for state in jobs.JobState
    ]
    return table(("from", "to"), [(state, following or "nothing: it has ended") for state, following in rows])


def _moves() -> Iterator[tuple[jobs.JobState, jobs.JobState]]:
    for state in jobs.JobState:
        for following in jobs.JobState:
            if following in jobs.TRANSITIONS[state]:
                yield state, following


def retries() -> str:
    """What happens after a failed attempt, by the class of its error."""
    return table(
        ("class", "what happened", "given up after", "final code"),
        [(code(kind), _MEANING[kind], _budget(kind), code(jobs.FINAL_ERROR_CODE[kind])) for kind in jobs.ErrorClass],
    )


def _budget(kind: jobs.ErrorClass) -> str:
    budget = jobs.ATTEMPT_BUDGET[kind]
    if budget is None:
        return "never; not charged"
    return f"{budget} attempt{'s' if budget > 1 else ''} of the class"


def timers() -> str:
    """Every setting that is a time."""
    sections = [*_SHARED.values(), *SERVICES.values()]
    named = [(name, section, field) for section in sections for name, field in _own_fields(section)]
    rows = [
        (variable(name), _default(field), ", ".join(_users(section)), field.description or "")
        for name, section, field in named
        if name.endswith("_s")
    ]
    return table(("setting", "default, seconds", "process", "meaning"), rows)


def settings() -> str:
    """Every setting, those that several processes share first."""
    parts = [_section(title, section) for title, section in _SHARED.items()]
    parts += [_section(f"Only the {service}", section) for service, section in SERVICES.items()]
    return "\n\n".join(parts)


def _section(title: str, section: type[BaseModel]) -> str:
    rows = [
        (variable(name), _default(field), _legal(field), field.description or "")
        for name, field in _own_fields(section)
    ]
    read_by = f"Read by: {', '.join(_users(section))}."
    return f"## {title}\n\n{read_by}\n\n" + table(("variable", "default", "legal", "meaning"), rows)


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return code(f"LATENTMILL_{name.upper()}")


def _own_fields(section: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    own = vars(section).get("__annotations__", {})
    return [(name, field) for name, field in section.model_fields.items() if name in own]


def _users(section: type[BaseModel]) -> list[str]:
    return [service for service, settings_class in SERVICES.items() if issubclass(settings_class, section)]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
    return "empty" if value in (None, "") else code(f"{value:g}" if isinstance(value, float) else value)


def _legal(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return ", ".join(code(choice) for choice in get_args(field.annotation))
    signs = {Ge: "≥", Gt: ">", Le: "≤"}
    bounds = [
        f"{sign} {getattr(bound, kind.__name__.lower()):g}"
        for bound in field.metadata
        for kind, sign in signs.items()
        if isinstance(bound, kind)
    ]
    return ", ".join(bounds)


def api_errors() -> str:
    """The catalogue of errors of the API."""
    return table(
        ("code", "HTTP status", "title", "may the same call succeed later"),
        [(code(kind.code), kind.status, kind.title, "yes" if kind.retryable else "no") for kind in CATALOGUE],
    )


def nginx_errors(front: str) -> str:
    """The problems that nginx answers itself, found in its configuration."""
    found = re.findall(r'"status":(\d+),"detail":"([^"]+)".*?"code":"(\w+)"', front)
    return table(("code", "HTTP status", "detail"), [(code(name), status, detail) for status, detail, name in found])


def job_errors() -> str:
    """The codes in a job's `error`."""
    rows = [(code(name), "", meaning) for name, meaning in CODES_OF_STATEMENTS.items()]
    rows += [
        (code(jobs.FINAL_ERROR_CODE[kind]), code(kind), f"Given up: {_MEANING[kind]}.")
        for kind in jobs.ErrorClass
        if jobs.ATTEMPT_BUDGET[kind] is not None
    ]
    return table(("code", "class", "meaning"), rows)


def metrics(root: Path) -> str:
    """Every metric, and the processes whose code counts it."""
    rows = []
    for name, metric in vars(telemetry).items():
        if isinstance(metric, MetricWrapperBase):
            family = next(iter(metric.describe()))
            shown = family.name + ("_total" if family.type == "counter" else "")
            # The library has no public way to ask for the names of the labels.
            labels = ", ".join(code(label) for label in metric._labelnames)  # noqa: SLF001
            rows.append((code(shown), family.type, labels, ", ".join(_counted_by(root, name)), family.documentation))
    return table(("metric", "kind", "labels", "process", "meaning"), rows)


def _counted_by(root: Path, metric: str) -> list[str]:
    used = re.compile(rf"telemetry\.{metric}\b|from common\.telemetry import .*\b{metric}\b")
    return [service for service in SERVICES if used.search(_source(root / service))]


@cache
def _source(folder: Path) -> str:
    return "\n".join(file.read_text("utf-8") for file in sorted(folder.rglob("*.py")))


def models() -> str:
    """The profiles as a table, one column a model."""
    columns = list(PROFILES.values())
    rows = [(name, *(show(profile) for profile in columns)) for name, show in _FACTS.items()]
    return table(("", *(code(profile.model) for profile in columns)), rows)


def _range(legal: Range | None) -> str:
    return "one expert: refused" if legal is None else f"{legal.default:g} ({legal.low:g} to {legal.high:g})"


def _frames(profile: ModelProfile) -> str:
    if profile.frame_choices is None:
        return f"{_range(profile.num_frames)}, 4k+1"
    return f"{profile.num_frames.default:g} (of {', '.join(map(str, profile.frame_choices))})"


_FACTS: dict[str, Callable[[ModelProfile], object]] = {
    "what it is": lambda profile: profile.title.split(":")[0],
    "input image": lambda profile: profile.image.value,
    "sizes on offer, the first is the default": lambda profile: ", ".join(f"{w}x{h}" for w, h in profile.sizes),
    "each side a multiple of, and at least": lambda profile: f"{profile.size_multiple}, {profile.min_side}",
    "most pixels a frame": lambda profile: f"{profile.max_area:,}",
    "`num_frames`": _frames,
    "`fps`": lambda profile: f"{profile.fps} (1 to 60)",
    "`num_inference_steps`": lambda profile: _range(profile.steps),
    "`guidance_scale`, high-noise expert": lambda profile: _range(profile.guidance_scale),
    "`guidance_scale_2`, low-noise expert": lambda profile: _range(profile.guidance_scale_2),
    "`flow_shift`": lambda profile: _range(profile.flow_shift),
    "boundary between the experts": lambda profile: profile.boundary_ratio or "none",
    "longest prompt": lambda profile: f"{profile.max_prompt_chars} characters",
}


def decisions(folder: Path) -> str:
    """The index of the decision records, by their headings."""
    lines = []
    for page in sorted(folder.glob("[0-9]*.md")):
        number, _, title = page.read_text("utf-8").splitlines()[0].removeprefix("# ").partition(". ")
        lines.append(f"{int(number)}. [{title}]({page.name})")
    return "\n".join(lines)
