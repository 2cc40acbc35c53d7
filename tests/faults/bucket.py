"""What lies in the bucket of a farm, asked past every proxy."""

import hashlib
from collections.abc import Mapping
from datetime import datetime

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError


class Bucket:
    """The bucket's videos."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._name = environment["LATENTMILL_S3_BUCKET"]
        self._s3 = boto3.client(
            "s3",
            endpoint_url=environment["LATENTMILL_S3_ENDPOINT"],
            region_name="us-east-1",
            aws_access_key_id=environment["LATENTMILL_S3_ACCESS_KEY"],
            aws_secret_access_key=environment["LATENTMILL_S3_SECRET_KEY"],
            config=Config(s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=20, proxies={}),
        )

    def measure(self, key: str) -> tuple[int, str] | None:
        """Size and SHA-256 of an object as it is read; None when there is none."""
        try:
            body = self._s3.get_object(Bucket=self._name, Key=key)["Body"].read()
        except ClientError:
            return None
        return len(body), hashlib.sha256(body).hexdigest()

    def videos(self) -> dict[str, datetime]:
        """Every key under videos/ with the time it was written."""
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix="videos/")
        return {item["Key"]: item["LastModified"] for page in pages for item in page.get("Contents", [])}

    def remove(self, key: str) -> None:
        """Delete an object."""
        self._s3.delete_object(Bucket=self._name, Key=key)
