"""The whole stack on one machine without a Docker engine: real servers in a private directory, on loopback."""

from infra.local.options import StackOptions
from infra.local.part import StackError
from infra.local.stack import LocalStack

__all__ = ["LocalStack", "StackError", "StackOptions"]
