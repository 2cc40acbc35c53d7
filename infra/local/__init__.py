"""The whole stack on one machine without a Docker engine: real servers in a private directory, on loopback.

For a machine whose users trust each other: everything has a password or a token but SeaweedFS' gRPC ports, over which
every local user could read and delete videos.
"""

from infra.local.options import StackOptions
from infra.local.part import StackError
from infra.local.stack import LocalStack

__all__ = ["LocalStack", "StackError", "StackOptions"]
