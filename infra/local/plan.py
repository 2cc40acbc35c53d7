"""What the parts of one stack are built from."""

import os
from dataclasses import dataclass
from pathlib import Path

from infra.local.credentials import Credentials
from infra.local.layout import Layout
from infra.local.options import StackOptions
from infra.local.ports import PortBook

DATABASE = "latentmill"
USER = "latentmill"
BUCKET = "latentmill"
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class Plan:
    """The directory, ports, passwords and options of one stack."""

    layout: Layout
    ports: PortBook
    credentials: Credentials
    options: StackOptions

    def database_url(self) -> str:
        """Return the address of the database, password included."""
        return f"postgresql://{USER}:{self.credentials.postgres}@127.0.0.1:{self.ports['postgres']}/{DATABASE}"

    def public_url(self) -> str:
        """Return the address at which clients reach nginx."""
        return f"http://127.0.0.1:{self.ports['nginx']}"

    def environment(self) -> dict[str, str]:
        """Return the LATENTMILL_* variables that every process of this stack shares."""
        secret = self.credentials
        endpoint = f"http://127.0.0.1:{self.ports['s3']}"
        return {
            "LATENTMILL_DATABASE_URL": self.database_url(),
            "LATENTMILL_AMQP_URL": f"amqp://{USER}:{secret.rabbitmq}@127.0.0.1:{self.ports['rabbitmq']}/%2F",
            "LATENTMILL_REDIS_URL": f"redis://:{secret.redis}@127.0.0.1:{self.ports['redis']}/0",
            "LATENTMILL_S3_ENDPOINT": endpoint,
            "LATENTMILL_S3_PUBLIC_ENDPOINT": endpoint,
            "LATENTMILL_S3_ACCESS_KEY": secret.s3_access_key,
            "LATENTMILL_S3_SECRET_KEY": secret.s3_secret_key,
            "LATENTMILL_S3_BUCKET": BUCKET,
            "LATENTMILL_URL_MODE": "edge",
            "LATENTMILL_EDGE_SECRET": secret.edge,
            "LATENTMILL_PUBLIC_URL": self.public_url(),
        }


def caller_environment() -> dict[str, str]:
    """Return the caller's environment, changed so that no proxy is asked for the stack's own addresses.

    A proxy could not reach them, and would be sent API keys and passwords.
    """
    environment = dict(os.environ)
    # Programs differ in which spelling they read, and Python's lower-case one hides the other.
    excepted = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if excepted != "*":
        excepted = ",".join(filter(None, (excepted, *LOOPBACK)))
    return environment | {"no_proxy": excepted, "NO_PROXY": excepted}


def server_environment(home: Path) -> dict[str, str]:
    """Return a bare environment for a server: what the caller's shell holds must not change it."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LANG": "C.UTF-8", "TZ": "UTC"}
