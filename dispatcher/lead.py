"""One dispatcher leads, by a lease row in Postgres. Two leaders would do no harm: every action is a compare-and-set."""

import contextlib
import time

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from common.db.upkeep import LEAD, STEP_DOWN
from common.telemetry import leading

ROLE = "dispatcher"


class Leadership:
    """Whether this process leads. The belief ends with the lease, also when Postgres cannot be asked."""

    def __init__(self, engine: AsyncEngine, holder: str, lease_s: float) -> None:
        self._engine = engine
        self._holder = holder
        self._lease_s = lease_s
        self._held_until = 0.0

    @property
    def held(self) -> bool:
        """True while the lease that was won last has not run out, by this process's own clock."""
        return time.monotonic() < self._held_until

    async def renew(self) -> None:
        """Win or keep the lease. The clock is read before the question: the belief ends no later than the row."""
        asked_at = time.monotonic()
        try:
            async with self._engine.connect() as connection:
                values = {"role": ROLE, "holder": self._holder, "lease_s": self._lease_s}
                won = (await connection.execute(LEAD, values)).first()
        except (SQLAlchemyError, OSError):
            won = None
        if won is not None:
            self._held_until = asked_at + self._lease_s
        leading.set(self.held)

    async def step_down(self) -> None:
        """Give the lease up, so that a standby need not wait for its end. While Postgres is away it ends by itself."""
        if self.held:
            self._held_until = 0.0
            with contextlib.suppress(SQLAlchemyError, OSError):
                async with self._engine.connect() as connection:
                    await connection.execute(STEP_DOWN, {"role": ROLE, "holder": self._holder})
