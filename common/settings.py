"""Every setting of the three services, read once from LATENTMILL_* in each __main__ and passed down in parts."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, AnyUrl, Field, SecretStr, TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
_PREFIX = "LATENTMILL_"
_WRONG_SETTINGS = 2  # the exit code of wrong use; trying again does not help


def _url(*schemes: str) -> Callable[[SecretStr], SecretStr]:
    """A check of an address with a password in it, whose message does not show the address."""

    def check(secret: SecretStr) -> SecretStr:
        try:
            url = TypeAdapter(AnyUrl).validate_python(secret.get_secret_value())
        except ValidationError:
            url = None
        if url is None or url.scheme not in schemes or (not url.host and url.scheme != "unix"):
            msg = f"must be an address that starts with {' or '.join(f'{scheme}://' for scheme in schemes)}"
            raise ValueError(msg)
        return secret

    return check


DatabaseUrl = Annotated[SecretStr, AfterValidator(_url("postgresql"))]
AmqpUrl = Annotated[SecretStr, AfterValidator(_url("amqp", "amqps"))]
RedisUrl = Annotated[SecretStr, AfterValidator(_url("redis", "rediss", "unix"))]


class _Section(BaseSettings):
    # A value that is refused may be a password: errors name the field and the reason alone.
    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True)


Section = TypeVar("Section", bound=_Section)


def read(kind: type[Section]) -> Section:
    """The settings in the environment. Names on stderr what is missing or wrong, without values, and exits with 2.

    Where LATENTMILL_SECRETS_DIR names a folder, a file in it named like a variable in lower case stands for one that is
    not set: passwords then are in no process's environment.
    """
    try:
        return kind(_secrets_dir=_secrets_folder())  # type: ignore[call-arg]  # pydantic-settings' documented way
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False, include_input=False):
            name = _PREFIX + "_".join(map(str, detail["loc"])).upper()
            reason = re.sub(r"^(Input |Value error, )", "", detail["msg"])
            sys.stderr.write(f"{name}: {'is required' if detail['type'] == 'missing' else reason}\n")
    raise SystemExit(_WRONG_SETTINGS)


def _secrets_folder() -> str | None:
    name = f"{_PREFIX}SECRETS_DIR"
    folder = os.environ.get(name) or None
    if folder is not None and not Path(folder).is_dir():
        sys.stderr.write(f"{name}: must be a folder with files such as latentmill_database_url\n")
        raise SystemExit(_WRONG_SETTINGS)
    return folder


class DatabaseSettings(_Section):
    """Where the truth about every job is kept."""

    database_url: DatabaseUrl = Field(description="postgresql://user:password@host:port/name")


class BrokerSettings(_Section):
    """RabbitMQ, and how long a submit may wait for it."""

    amqp_url: AmqpUrl = Field(description="amqp://user:password@host:port/vhost")
    publish_timeout_s: Seconds = Field(
        0.25, description="A submit waits this long for the broker's confirm, then leaves the job to the dispatcher."
    )


class EventSettings(_Section):
    """Redis: progress and wake-ups. Nothing is lost without it."""

    redis_url: RedisUrl = Field(description="redis://:password@host:port/0")


class StorageSettings(_Section):
    """The S3 bucket, and how clients are given its objects."""

    s3_endpoint: str | None = Field(None, description="S3 endpoint; empty for AWS.")
    s3_public_endpoint: str | None = Field(None, description="The endpoint that clients reach, for presigned URLs.")
    s3_region: str = Field("us-east-1", description="Region used in signatures.")
    s3_access_key: SecretStr = Field(description="Access key of the bucket.")
    s3_secret_key: SecretStr = Field(description="Secret key of the bucket.")
    s3_bucket: str = Field("latentmill", description="Bucket for inputs, videos and checkpoints.")
    url_mode: Literal["edge", "s3"] = Field("edge", description="edge: signed for nginx. s3: presigned.")
    url_ttl_s: int = Field(3600, ge=1, le=604_800, description="How long a result address is good for, in seconds.")
    edge_secret: SecretStr = Field(SecretStr(""), description="Secret shared with the media edge; needed for edge.")
    public_url: str = Field("http://127.0.0.1:8080", description="Address at which clients reach nginx.")


class ApiSettings(DatabaseSettings, BrokerSettings, EventSettings, StorageSettings):
    """The api process."""

    api_host: str = Field("127.0.0.1", description="Address the api listens on.")
    api_port: Port = Field(8000, description="Port the api listens on.")
    metrics_port: Port = Field(0, description="Port of /metrics on 127.0.0.1; 0 turns it off.")
    metrics_host: str = Field("127.0.0.1", description="Address of /metrics.")
    queue_deadline_s: Seconds = Field(3600, description="A job that waits longer without a start expires.")
    total_deadline_s: Seconds = Field(86_400, description="A job that is not done by then fails.")
    max_sockets: int = Field(5000, ge=1, description="Open WebSockets and SSE streams one process serves.")
    max_sockets_per_tenant: int = Field(500, ge=1, description="Those of one tenant among them.")


class DispatcherSettings(DatabaseSettings, BrokerSettings, EventSettings):
    """The dispatcher process."""

    metrics_port: Port = Field(0, description="Port of /metrics on 127.0.0.1; 0 turns it off.")
    metrics_host: str = Field("127.0.0.1", description="Address of /metrics.")
    dispatch_window: int | None = Field(
        None, ge=0, description="Tickets out per model. Empty: 2 x the live batch capacity, at least 8. 0: no bound."
    )
    lease_s: Seconds = Field(45, description="Lease of a running job; also the warm-up after an outage.")
    leader_lease_s: Seconds = Field(5, description="Lease of the leading dispatcher.")
    scan_gap_s: Seconds = Field(15, description="A scan older than this means an outage: nothing expires for a lease.")
    ticket_lost_after_s: Seconds = Field(
        60, description="A released job without a claim for so long may have lost its ticket."
    )
    ticket_recheck_s: Seconds = Field(30, description="The broker must be short of tickets twice in this time.")
    deadline_backstop_s: Seconds = Field(
        30, description="The dispatcher fails a late job this long after the worker should have."
    )


class WorkerSettings(DatabaseSettings, BrokerSettings, EventSettings, StorageSettings):
    """The worker process: one per GPU."""

    engine: Literal["wan", "synthetic"] = Field(
        "wan", description="wan: Wan2.2. synthetic: drawn clips for load tests."
    )
    model: str = Field("tiny-wan2.2-t2v", description="Profile this worker serves.")
    model_path: Path | None = Field(None, description="Folder with the checkpoint; needed by the wan engine.")
    gpu: Literal["any", "auto"] = Field(
        "any", description="any: what CUDA_VISIBLE_DEVICES says. auto: the first GPU that no other worker has claimed."
    )
    gpu_lock_dir: Path = Field(
        Path("/run/lock/latentmill"),
        description="Where GPUs are claimed by auto: the same folder for all workers of a machine.",
    )
    # At real sizes one job keeps a GPU busy, and a batch takes as long as its jobs one after the other.
    max_batch: int = Field(1, ge=1, le=64, description="Jobs in one pipeline call, and the prefetch.")
    batch_wait_s: float = Field(0.05, ge=0, description="How long a batch that is not full waits for mates.")
    spool_dir: Path = Field(Path("spool"), description="Where finished videos wait for their upload, by worker.")
    spool_jobs: int = Field(
        64, ge=1, description="Unfinished and finished jobs that are not delivered yet; beyond it no new one is taken."
    )
    spool_bytes: int = Field(
        20 * 2**30, ge=1, description="Bytes of videos that are not delivered yet; beyond it no new job is taken."
    )
    spool_free_bytes: int = Field(
        256 * 2**20, ge=0, description="No new job is taken while the disk of the spool has less free."
    )
    direct_claim_after_s: Seconds = Field(
        5, description="RabbitMQ is away for so long: jobs are claimed from Postgres without tickets."
    )
    database_connections: int = Field(
        3, ge=1, description="Connections to Postgres: with N workers it must allow N times as many, and some more."
    )
    worker_id: str | None = Field(None, description="Name of this worker; empty: host and GPU.")
    metrics_port: Port = Field(0, description="Port of /metrics on 127.0.0.1; 0 turns it off.")
    metrics_host: str = Field("127.0.0.1", description="Address of /metrics.")
    lease_s: Seconds = Field(45, description="Lease of a running job.")
    heartbeat_s: Seconds = Field(10, description="Between two renewals of the lease.")
    stall_s: Seconds = Field(120, description="No sign of progress for so long: the engine child is replaced.")
    load_timeout_s: Seconds = Field(900, description="Loading and warming up the model may take this long.")
    drain_grace_s: Seconds = Field(100, description="After SIGTERM the running batch may take this long.")
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0: torch decides.")
    synthetic_step_s: float = Field(0.05, ge=0, description="Seconds per step of the synthetic engine.")
    synthetic_markers: str = Field(
        "", description="What the synthetic engine reads behind every prompt, [error] for example: a bad worker."
    )
