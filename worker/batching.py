"""Which of the tickets in hand run together. Pure: no clock, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.domain.tickets import Ticket


@dataclass(frozen=True, slots=True)
class Choice:
    """`batch` runs now; `rest` goes back. Doubled tickets of a job are in neither."""

    batch: tuple[Ticket, ...]
    rest: tuple[Ticket, ...]


def choose_batch(tickets: Sequence[Ticket], max_batch: int) -> Choice:
    """Take the oldest ticket and all that may share its pipeline call, up to `max_batch` of them, in order."""
    if not tickets:
        return Choice((), ())
    first_of_job = {ticket.job_id: ticket for ticket in reversed(tickets)}
    distinct = [ticket for ticket in tickets if first_of_job[ticket.job_id] is ticket]
    batch = [ticket for ticket in distinct if ticket.batch_key == distinct[0].batch_key][:max_batch]
    chosen = {ticket.job_id for ticket in batch}
    return Choice(tuple(batch), tuple(ticket for ticket in distinct if ticket.job_id not in chosen))
