"""A ticket says "this job may be claimed". It carries no prompt and no secret, and losing it loses nothing."""

import json
from dataclasses import dataclass
from uuid import UUID

MAX_TICKET_BYTES = 300


class BadTicketError(ValueError):
    """A message that is not a ticket of this or an earlier version."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Job `job_id` of `model` may be claimed.

    dispatch_seq tells this release from earlier ones. batch_key is equal for jobs that may share a pipeline call, so
    that a worker can choose a batch before it asks Postgres.
    """

    job_id: UUID
    dispatch_seq: int
    model: str
    batch_key: str
    traceparent: str | None = None

    @property
    def message_id(self) -> str:
        """Identifies one release of one job on the wire."""
        return f"{self.job_id}:{self.dispatch_seq}"


def encode_ticket(ticket: Ticket) -> bytes:
    """The ticket as compact JSON of at most MAX_TICKET_BYTES."""
    body = {
        "v": 1,
        "job": str(ticket.job_id),
        "seq": ticket.dispatch_seq,
        "model": ticket.model,
        "key": ticket.batch_key,
    }
    if ticket.traceparent:
        body["trace"] = ticket.traceparent
    return json.dumps(body, separators=(",", ":")).encode()


def decode_ticket(body: bytes) -> Ticket:
    """Read a ticket. Raises BadTicketError for anything else, whatever its size or content."""
    if len(body) > MAX_TICKET_BYTES:
        msg = f"a ticket has at most {MAX_TICKET_BYTES} bytes, this message has {len(body)}"
        raise BadTicketError(msg)
    try:
        raw = json.loads(body)
        if raw["v"] != 1:
            msg = f"unknown ticket version {raw['v']!r}"
            raise BadTicketError(msg)
        return Ticket(UUID(raw["job"]), int(raw["seq"]), str(raw["model"]), str(raw["key"]), raw.get("trace"))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        msg = f"not a ticket: {type(error).__name__}"
        raise BadTicketError(msg) from error
