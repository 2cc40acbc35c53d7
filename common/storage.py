"""The S3 bucket. Objects are immutable and carry their attempt in the key, so no attempt overwrites another's.

`python -m common.storage` prepares the bucket; it may run any number of times.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import boto3
import structlog
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from common.settings import StorageSettings, read
from common.telemetry import configure_logging

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

VIDEO_PREFIX = "videos/"
# What boto3 and the bucket can fail with; anything else is a fault of ours. upload_file wraps a ClientError once more.
StorageError = (Boto3Error, BotoCoreError, ClientError, OSError)

log = structlog.get_logger()


def client(settings: StorageSettings) -> "S3Client":
    """A client for the services' own reads and writes. Thread-safe."""
    return _client(settings, settings.s3_endpoint)


def video_key(job_id: UUID, attempt: int, sha256: str) -> str:
    """Where an attempt's video goes. The hash makes the key unguessable as well as unique."""
    return f"{VIDEO_PREFIX}{job_id}/{attempt}-{sha256[:16]}.mp4"


def upload_video(s3: "S3Client", settings: StorageSettings, path: Path, key: str, sha256: str) -> None:
    """Store the file under the key. Raises one of StorageError."""
    s3.upload_file(
        str(path),
        settings.s3_bucket,
        key,
        ExtraArgs={
            "ContentType": "video/mp4",
            "CacheControl": "public, max-age=31536000, immutable",
            "Metadata": {"sha256": sha256},
        },
    )
    stored = s3.head_object(Bucket=settings.s3_bucket, Key=key)["ContentLength"]
    if stored != path.stat().st_size:
        msg = f"the bucket holds {stored} bytes of {key}, the file has {path.stat().st_size}"
        raise OSError(msg)


def delete_object(s3: "S3Client", settings: StorageSettings, key: str) -> None:
    """Remove an object that no job owns. Raises one of StorageError."""
    s3.delete_object(Bucket=settings.s3_bucket, Key=key)


def presigner(settings: StorageSettings) -> Callable[[str], str]:
    """A function that makes GET addresses good for url_ttl_s seconds.

    It signs for the address that users reach, since a signature holds for one host name. Nothing is sent anywhere.
    """
    s3 = _client(settings, settings.s3_public_endpoint or settings.s3_endpoint)

    def presign(key: str) -> str:
        asked = {"Bucket": settings.s3_bucket, "Key": key, "ResponseContentType": "video/mp4"}
        return s3.generate_presigned_url("get_object", Params=asked, ExpiresIn=settings.url_ttl_s)

    return presign


def prepare_bucket(s3: "S3Client", settings: StorageSettings) -> None:
    """Create the bucket when it is missing; for the edge, let nginx read videos (and nothing else) without a key."""
    try:
        s3.head_bucket(Bucket=settings.s3_bucket)
    except ClientError:
        s3.create_bucket(Bucket=settings.s3_bucket)
        log.info("bucket_created", bucket=settings.s3_bucket)
    if settings.url_mode == "edge":
        if settings.s3_endpoint is None:
            # AWS is reachable by everybody, not by the edge alone: the policy would publish every video.
            msg = "LATENTMILL_URL_MODE=edge needs LATENTMILL_S3_ENDPOINT, a bucket that only the edge reaches; use s3"
            raise ValueError(msg)
        s3.put_bucket_policy(Bucket=settings.s3_bucket, Policy=json.dumps(_edge_policy(settings.s3_bucket)))


def _edge_policy(bucket: str) -> dict[str, object]:
    # The S3 port is reachable for the edge only; the edge has checked the signature.
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": ["s3:GetObject"],
        "Resource": [f"arn:aws:s3:::{bucket}/{VIDEO_PREFIX}*"],
    }
    return {"Version": "2012-10-17", "Statement": [statement]}


def _client(settings: StorageSettings, endpoint: str | None) -> "S3Client":
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=settings.s3_region,
        aws_access_key_id=settings.s3_access_key.get_secret_value(),
        aws_secret_access_key=settings.s3_secret_key.get_secret_value(),
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            connect_timeout=5,
            read_timeout=60,  # the upload timer of the lifecycle: so long without progress is a failure
            retries={"max_attempts": 3, "mode": "standard"},
        ),
    )


if __name__ == "__main__":
    configure_logging("storage")
    _settings = read(StorageSettings)
    prepare_bucket(client(_settings), _settings)
