"""`tracekit doctor`: check if collecting will work here.

In: the training's Python interpreter. Out: a line for each dependency. Exits with 3 if any check fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from msgspec import Struct

from tracekit.base.exit_codes import ExitCode
from tracekit.base.stderr import progress
from tracekit.base.text import printable
from tracekit.collectors.launch.doctor import Check, CheckOutcome, checks
from tracekit.commands.options import OUT


class DoctorOutput(Struct, frozen=True):
    """What `tracekit doctor --json` prints."""

    works: bool
    checks: list[Check]


@click.command("doctor")
@click.option("--python", metavar="PATH", help="Interpreter of the training [default: this one].")
@click.option("--store", type=OUT, help="Store to write to [default: $TRACEKIT_STORE, else ./tracekit.store].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the lines.")
def doctor_command(python: str | None, store: Path | None, as_json: bool) -> int:
    """Will `tracekit collect` work here? Checks what it needs, and tries it with two ranks."""
    results = []
    with progress("checking, and training two ranks for a moment"):
        for check in checks(python or sys.executable, store):
            results.append(check)
            if not as_json:
                click.echo(f"{check.outcome:<5}  {check.subject:<11}  {printable(check.detail)}")
    fails = any(check.outcome is CheckOutcome.FAILS for check in results)
    if as_json:
        click.echo(msgspec.json.encode(DoctorOutput(not fails, results)))
    else:
        click.echo(
            "\nCollecting will not work here yet." if fails else "\nNext: tracekit collect -- torchrun ... train.py"
        )
    return ExitCode.CONDITION if fails else ExitCode.DONE
