"""Injects one fault after the other into a farm, lifts it, and has the oracle look at every job of that time."""

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.farm import Farm
from tests.faults.fault import Fault, SkippedError
from tests.faults.oracle import await_ends, gather, violations


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one fault. `verdict`: passed, failed or skipped; `note` holds figures, `reasons` what went wrong."""

    number: str
    area: str
    injected: str
    invariants: tuple[str, ...]
    verdict: str
    seconds: float
    jobs: int
    attempts: int
    note: str
    reasons: tuple[str, ...] = ()

    @property
    def row(self) -> str:
        """The row of the matrix: F41c is of F41."""
        return self.number[:3]

    def line(self) -> str:
        """The finding on one line."""
        words = self.note or "; ".join(self.reasons)[:300]
        checked = " ".join(self.invariants)
        shown = f"{self.number:<6}{self.verdict:<8}{self.seconds:6.1f} s  {self.injected}  [{checked}]"
        return f"{shown}  {words}" if words else shown


def examine(farm: Farm, fault: Fault) -> Finding:
    """Inject a fault and find out whether everything holds. The farm is calm afterwards, unless it failed."""
    began = time.monotonic()
    reasons: list[str] = []
    note, verdict = "", "passed"
    jobs: list[str] = []
    attempts = 0
    try:
        note = fault.inject(farm) or ""
    except SkippedError as missing:
        verdict, note = "skipped", str(missing)
    except Exception as error:  # noqa: BLE001 - the edge of a fault: the others are to be seen as well
        reasons.append(_told(error))
    try:
        farm.calm()
        jobs = farm.log.since(began)
        await_ends(farm, jobs, fault.within_s)
        evidence = gather(farm, jobs)
        attempts = evidence.attempts_run
        reasons += violations(evidence, fault.invariants)
        farm.await_ready()
        farm.age()
    except Exception as error:  # noqa: BLE001 - the same
        reasons.append(_told(error))
    return Finding(
        number=fault.number,
        area=fault.area,
        injected=fault.injected,
        invariants=fault.invariants,
        verdict="failed" if reasons else verdict,
        seconds=round(time.monotonic() - began, 1),
        jobs=len(jobs),
        attempts=attempts,
        note=note,
        reasons=tuple(reasons[:20]),
    )


def _told(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)
    ours = next((frame for frame in reversed(where) if "tests/faults" in frame.filename), where[-1])
    return f"{type(error).__name__} at {Path(ours.filename).name}:{ours.lineno}: {error}"


def run_all(faults: Sequence[Fault], open_farm: Callable[[], Farm], report: Callable[[Finding], None]) -> list[Finding]:
    """Run the faults in their order. After one that failed, the rest gets a fresh farm."""
    findings: list[Finding] = []
    farm: Farm | None = None
    try:
        for fault in faults:
            farm = farm or open_farm()
            findings.append(examine(farm, fault))
            report(findings[-1])
            if findings[-1].verdict == "failed":
                farm.close()
                farm = None
    finally:
        if farm is not None:
            farm.close()
    return findings


def write_report(path: Path, findings: Sequence[Finding], **facts: object) -> None:
    """Write the findings as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {**facts, "faults": [asdict(finding) for finding in findings]}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
