"""Jobs straight from Postgres while RabbitMQ is away: a claim needs no ticket."""

import random
import time
from typing import Any

import structlog
from sqlalchemy import Engine, Row
from sqlalchemy.exc import SQLAlchemyError

from common.db.fairness import RELEASE
from common.db.statements import RELEASED
from common.domain.tickets import Ticket

# Between two looks that found nothing: a worker costs Postgres one or two short statements a second.
_LOOK_S = 1.0
# Of what is released already so many times a batch is read, since all workers look at the same head of the queue.
_CHOICE = 4

log = structlog.get_logger()


class DirectClaims:
    """Finds what this worker may claim. For the main thread."""

    def __init__(self, engine: Engine, model: str, max_batch: int) -> None:
        self._engine = engine
        self._model = model
        self._max_batch = max_batch
        self._next_at = 0.0
        self._misses = 0

    def look(self) -> tuple[list[Ticket], list[Ticket]]:
        """Jobs that were released, or jobs released by this very call, of which the caller gives back the rest.

        Released ones come first: their tickets lie in the broker. Others are released here, fairly, as the dispatcher
        would. Both are empty until it is time to look again, and while Postgres is away, too.
        """
        if time.monotonic() < self._next_at:
            return [], []
        self._next_at = time.monotonic() + _LOOK_S * random.uniform(0.5, 1.5)  # noqa: S311  guards nothing
        try:
            return self._find()
        except SQLAlchemyError as error:
            log.warning("direct_claim_failed", error=type(error).__name__)
            return [], []

    def note(self, *, claimed: bool) -> None:
        """Take note whether a job could be claimed: then there may be more.

        Else another worker was faster, and the next look begins further back in the queue.
        """
        self._next_at = 0.0 if claimed else self._next_at
        self._misses = 0 if claimed else self._misses + 1

    def _find(self) -> tuple[list[Ticket], list[Ticket]]:
        with self._engine.connect() as connection:
            asked = {"model": self._model, "limit": _CHOICE * self._max_batch}
            old = [_ticket(row) for row in connection.execute(RELEASED, asked)]
            if old:
                first = self._misses % len(old)
                return old[first:] + old[:first], []
            asked = {"model": self._model, "room": self._max_batch}
            return [], [_ticket(row) for row in connection.execute(RELEASE, asked)]


def _ticket(row: Row[Any]) -> Ticket:
    return Ticket(row.id, row.dispatch_seq, row.model, row.batch_key)
