"""Make the passwords of a compose stack on its first start: the task `credentials` of docker-compose.yml.

Each consumer has a volume of its own and sees nothing but what it needs. The values are kept in another volume that
only this task mounts, so a consumer's files are written anew when they are missing. A password that a server has taken
into its data cannot be changed here.
"""

import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

VOLUMES = Path("/credentials")
# hex needs no quoting in configuration files, shells and URLs.
_NAMES = (
    "postgres",
    "rabbitmq",
    "redis",
    "edge",
    "s3_setup_key",
    "s3_setup_secret",
    "s3_worker_key",
    "s3_worker_secret",
    "s3_api_key",
    "s3_api_secret",
    "s3_volume_write",
    "s3_volume_read",
    "s3_filer_write",
    "s3_filer_read",
)
_S3_USERS = ("worker", "api")
_RABBITMQ = """\
default_user = latentmill
default_pass = {rabbitmq}
default_user_tags.monitoring = true
"""
# Without these tokens the S3 keys would guard the S3 port alone, and the ports behind it nothing.
_SEAWEEDFS = """\
WEED_JWT_SIGNING_KEY={s3_volume_write}
WEED_JWT_SIGNING_READ_KEY={s3_volume_read}
WEED_JWT_FILER_SIGNING_KEY={s3_filer_write}
WEED_JWT_FILER_SIGNING_READ_KEY={s3_filer_read}
"""


def load_or_make(path: Path) -> dict[str, str]:
    """Return the values kept at `path`, making those that are missing."""
    kept: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    values = {name: secrets.token_hex(20) for name in _NAMES} | kept
    if values != kept:
        _write(path, json.dumps(values, indent=1), 0o600)
    return values


def files(values: Mapping[str, str], bucket: str, *, one_s3_key: bool = False) -> dict[str, dict[str, str]]:
    """Return the files of each consumer: folder, then name, then content.

    With `one_s3_key` all use the key of the task that makes the bucket: not every store can be given several by a file.
    """
    if one_s3_key:
        shared = {f"s3_{owner}_{part}": values[f"s3_setup_{part}"] for owner in _S3_USERS for part in ("key", "secret")}
        values = {**values, **shared}
    store = {
        "latentmill_database_url": f"postgresql://latentmill:{values['postgres']}@postgres:5432/latentmill",
        "latentmill_amqp_url": f"amqp://latentmill:{values['rabbitmq']}@rabbitmq:5672/%2F",
        "latentmill_redis_url": f"redis://:{values['redis']}@redis:6379/0",
    }
    edge = {"latentmill_edge_secret": values["edge"]}
    return {
        "postgres": {"password": values["postgres"]},
        "rabbitmq": {"rabbitmq.conf": _RABBITMQ.format_map(values)},
        "redis": {"redis.conf": f"requirepass {values['redis']}\n"},
        "seaweedfs": {
            "s3.json": _identities(values, bucket),
            "seaweedfs.env": _SEAWEEDFS.format_map(values),
            # What infra/docker/minio.yml reads.
            "access_key": values["s3_setup_key"],
            "secret_key": values["s3_setup_secret"],
        },
        "nginx": {"edge_secret": values["edge"]},
        "api": store | edge | _s3_keys(values, "api"),
        "dispatcher": store,
        "worker": store | _s3_keys(values, "worker"),
        "setup": {"latentmill_database_url": store["latentmill_database_url"]} | edge | _s3_keys(values, "setup"),
    }


def _s3_keys(values: Mapping[str, str], owner: str) -> dict[str, str]:
    return {
        "latentmill_s3_access_key": values[f"s3_{owner}_key"],
        "latentmill_s3_secret_key": values[f"s3_{owner}_secret"],
    }


def _identities(values: Mapping[str, str], bucket: str) -> str:
    """Who may do what at the S3 port: the task that makes the bucket all, a worker its objects, an api reading."""
    actions = {
        "setup": ["Admin"],
        "worker": [f"{verb}:{bucket}" for verb in ("Read", "Write", "List")],
        "api": [f"{verb}:{bucket}" for verb in ("Read", "List")],
    }
    identities = [
        {
            "name": owner,
            "credentials": [{"accessKey": values[f"s3_{owner}_key"], "secretKey": values[f"s3_{owner}_secret"]}],
            "actions": allowed,
        }
        for owner, allowed in actions.items()
    ]
    return json.dumps({"identities": identities}, indent=1)


def write(volumes: Path, bucket: str, *, one_s3_key: bool = False) -> None:
    """Make what is missing and write every consumer's files. Raises OSError when a volume cannot be written."""
    values = load_or_make(volumes / "kept" / "credentials.json")
    for consumer, contents in files(values, bucket, one_s3_key=one_s3_key).items():
        for name, content in contents.items():
            # Readable by whatever user a server's image has: nothing else mounts the volume.
            _write(volumes / consumer / name, content, 0o444)


def _write(path: Path, content: str, mode: int) -> None:
    """Replace a file as a whole: whoever reads it meanwhile sees the old one or the new one."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.chmod(mode)
    fresh.replace(path)


if __name__ == "__main__":
    write(VOLUMES, os.environ["LATENTMILL_S3_BUCKET"], one_s3_key=os.environ.get("LATENTMILL_S3_KEYS") == "one")
    sys.stdout.write("credentials: ready\n")
