"""The part `s3`: SeaweedFS' all-in-one server."""

from collections.abc import Iterator
from pathlib import Path

from infra.local import binaries, probes
from infra.local.credentials import Credentials
from infra.local.layout import private_folder
from infra.local.part import Launch, Part
from infra.local.plan import Plan, server_environment

# SeaweedFS adds this to each port for its gRPC twin.
GRPC_OFFSET = 10_000


def part(plan: Plan) -> Part:
    """Return the part."""
    port = plan.ports["s3"]
    return Part(
        "s3", lambda: _launch(plan), lambda: probes.answers_http(port, "/healthz"), litter=tuple(_grpc_sockets(plan))
    )


def _grpc_sockets(plan: Plan) -> Iterator[Path]:
    """Yield the sockets that it makes at fixed places and leaves there when it ends in the wrong moment."""
    for server in ("s3", "master", "volume", "filer", "admin"):
        port = plan.ports["s3" if server == "s3" else f"s3.{server}"] + GRPC_OFFSET
        yield Path(f"/tmp/seaweedfs-{server}-grpc-{port}.sock")  # noqa: S108  its own choice, not ours


def _launch(plan: Plan) -> Launch:
    folder = private_folder(plan.layout.data / "s3")
    environment = (
        server_environment(folder)
        | _keys(plan.credentials)
        | {
            # A 200 MB upload takes 1 GB of memory without these and 400 MB with them, at the same speed.
            "GOMEMLIMIT": "256MiB",
            "GOGC": "50",
        }
    )
    return Launch((str(binaries.seaweedfs()), *_arguments(plan, str(folder))), folder, environment)


def _keys(credentials: Credentials) -> dict[str, str]:
    """Return the credentials of the S3 port, and the keys of the tokens that the ports behind it want.

    The S3 credentials guard the S3 port alone: without these keys every local user could read, write and delete videos
    at the filer and the volume server. The keys differ, so that a token to read does not write.
    """
    return {
        "AWS_ACCESS_KEY_ID": credentials.s3_access_key,
        "AWS_SECRET_ACCESS_KEY": credentials.s3_secret_key,
        "WEED_JWT_SIGNING_KEY": credentials.s3_volume_write,
        "WEED_JWT_SIGNING_READ_KEY": credentials.s3_volume_read,
        "WEED_JWT_FILER_SIGNING_KEY": credentials.s3_filer_write,
        "WEED_JWT_FILER_SIGNING_READ_KEY": credentials.s3_filer_read,
    }


def _arguments(plan: Plan, folder: str) -> tuple[str, ...]:
    ports = plan.ports
    return (
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.port={ports['s3']}",
        f"-master.port={ports['s3.master']}",
        f"-volume.port={ports['s3.volume']}",
        f"-filer.port={ports['s3.filer']}",
        f"-admin.port={ports['s3.admin']}",
        # Below the working directory, for /tmp would keep them after the end. Sockets have short paths, hence relative.
        "-s3.localSocket=s3.sock",
        "-filer.localSocket=filer.sock",
        # mini remembers its flags in the data folder, so what is off is said at every start.
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        # The master would sign those tokens for whoever asks and delete collections; S3 itself goes over gRPC. The gRPC
        # ports stay open to every local user: closing them takes a certificate authority.
        "-disableHttp",
    )
