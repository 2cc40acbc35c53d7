"""`python -m tests.faults`: the fault matrix against the real services."""

import importlib
import sys
import time
from pathlib import Path

import click

from tests.conftest import REPOSITORY, stack_directory
from tests.faults.farm import Farm
from tests.faults.fault import FAULTS, Fault
from tests.faults.runner import Finding, run_all, write_report

AREAS = ("worker", "broker", "database", "cache", "storage", "api", "dispatcher", "load")
REPORT = REPOSITORY / "out" / "faults.json"


def all_faults() -> list[Fault]:
    """Every fault of every area, in the order of their numbers."""
    for area in AREAS:
        importlib.import_module(f"tests.faults.{area}_faults")
    return sorted(FAULTS, key=lambda fault: fault.number)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("numbers", nargs=-1)
@click.option("--seed", type=int, default=1, show_default=True, help="Of everything that is drawn.")
@click.option("--short", is_flag=True, help="As short as in `make test`; without NUMBERS those alone.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), default=REPORT, show_default=True)
def main(numbers: tuple[str, ...], seed: int, report: Path, *, short: bool) -> None:
    """Inject every fault, or those with the given NUMBERS (F03 F37), and check the invariants after each."""
    faults = [fault for fault in all_faults() if _chosen(fault, numbers, short=short)]
    if not faults:
        raise click.BadArgumentUsage(f"no fault is numbered {' or '.join(numbers)}")
    click.echo(f"{len(faults)} faults, seed {seed}")
    began = time.monotonic()

    def open_farm() -> Farm:
        farm = Farm(stack_directory("matrix"), seed, thorough=not short)
        try:
            farm.start()
        except BaseException:
            farm.close()
            raise
        return farm

    findings = run_all(faults, open_farm, lambda finding: click.echo(finding.line()))
    _summarise(findings, report, seed, time.monotonic() - began)


def _chosen(fault: Fault, numbers: tuple[str, ...], *, short: bool) -> bool:
    if numbers:
        return fault.number in numbers or fault.row in numbers
    return fault.short or not short


def _summarise(findings: list[Finding], report: Path, seed: int, seconds: float) -> None:
    counts = {verdict: [f for f in findings if f.verdict == verdict] for verdict in ("passed", "failed", "skipped")}
    write_report(report, findings, seed=seed, seconds=round(seconds, 1))
    rows = {finding.row for finding in counts["passed"]}
    jobs, attempts = sum(f.jobs for f in findings), sum(f.attempts for f in findings)
    for finding in counts["skipped"]:
        click.echo(f"skipped: {finding.number} {finding.injected}: {finding.note}")
    click.echo(f"{len(rows)} rows of the matrix, {jobs} jobs, {attempts} attempts, {seconds:.0f} s; report in {report}")
    click.echo(f"{len(counts['passed'])} passed, {len(counts['failed'])} failed")
    sys.exit(1 if counts["failed"] or not counts["passed"] else 0)


if __name__ == "__main__":
    main()
