"""The command line of `tracekit-collect`, the distribution without the analysis: it records, and leaves the segments.

In: arguments. Out: a run directory that `tracekit import` reads on another machine. Imports the standard library only,
so nothing else is installed with the training. If all of tracekit is installed, its own command line is used.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Callable

from tracekit.base.errors import SelectionError, TracekitError
from tracekit.base.stderr import say
from tracekit.base.text import bytes_of, printable
from tracekit.collectors.launch.launcher import (
    await_other_launchers,
    finish_run,
    hold,
    prepare_run,
    release,
    run_command,
    script_name,
    why_nothing_was_recorded,
)
from tracekit.collectors.record.wire_format import IDLE, NcclEvent, RecordingSchedule, RuntimeOptions, attempt_directory
from tracekit.collectors.run_directory.launchers import attempts, ranks_in, running_launchers, write_manifest
from tracekit.collectors.run_directory.steering import find_job, first_common_step, write_schedule

EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; an expected failure is one line and exit code 2."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except TracekitError as error:
        say(f"tracekit: {printable(str(error))}")
    return EXIT_BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tracekit", description="Record step traces. The analysis is in the distribution tracekit."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    collect = commands.add_parser(
        "collect", help="record an unmodified training command: tracekit collect [OPTIONS] -- torchrun ... train.py"
    )
    collect.set_defaults(run=_collect)
    collect.add_argument("command", nargs="+", metavar="COMMAND", help="the training command, after --")
    collect.add_argument(
        "--segments",
        type=Path,
        metavar="FOLDER",
        help="folder the ranks write to; one shared folder for all nodes of a run [default: a new one here]",
    )
    collect.add_argument("--steps", type=_value(parse_steps), default=(1, None), metavar="FROM:TO")
    collect.add_argument("--every", type=_value(_count), default=1, metavar="N", help="record one step in N")
    collect.add_argument(
        "--for", dest="length", type=_value(_count), default=1, metavar="N", help="with --every: record N in a row"
    )
    collect.add_argument("--idle", action="store_true", help="record nothing until `tracekit attach` asks for it")
    collect.add_argument(
        "--keep",
        type=_value(parse_size),
        default=0,
        metavar="SIZE",
        help="keep at most this much of each rank's segments on disk, such as 2GB; the oldest are deleted",
    )
    collect.add_argument("--no-stacks", action="store_true", help="never say which line of code a slow rank is at")
    collect.add_argument("--name", help="how `tracekit attach` finds the job [default: script]")
    attach = commands.add_parser("attach", help="record a few steps of a job that `tracekit collect` launched")
    attach.set_defaults(run=_attach)
    attach.add_argument("job", nargs="?", help="name, process id or folder of the job [default: the only one here]")
    attach.add_argument("--steps", type=_value(_count), default=5, metavar="N", help="record N steps [default: 5]")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of steps; write 1 or more")
    return int(text)


def _value(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` for argparse, which shows the messages of its own error class only."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _collect(parsed: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    schedule = schedule_options(parsed.steps, parsed.every, parsed.length, idle=parsed.idle, overhead=False)
    hold()
    try:
        options = RuntimeOptions(
            **asdict(schedule), keep_bytes=parsed.keep, stacks=stacks_allowed() and not parsed.no_stacks
        )
        directory = (parsed.segments or Path(f"tracekit-{datetime.now():%Y%m%d-%H%M%S}")).absolute()
        environment = prepare_run(directory, options, parsed.command)
        launched = run_command(parsed.command, environment, directory, {}, parsed.name or script_name(parsed.command))
    finally:
        release()
    if launched.first:
        await_other_launchers(directory)
        for line in _conclude(directory, launched.ended_ns):
            say(f"tracekit: {printable(line)}")
    return launched.exit_code


def _attach(parsed: argparse.Namespace) -> int:
    """Record steps of a running job, and print how to read them."""
    directory = find_job(parsed.job)
    if not running_launchers(directory):
        raise SelectionError(f"{directory}: the job has ended; attach while it runs")
    first = first_common_step(directory)
    write_schedule(directory, RecordingSchedule(first, first + parsed.steps))
    say(f"tracekit: steps {first} to {first + parsed.steps - 1} will be recorded when the job reaches them")
    say(f"tracekit: next, where tracekit is installed: tracekit whatif {shlex.quote(str(directory))}")
    return 0


def _conclude(directory: Path, ended_ns: int) -> list[str]:
    """Close the run directory and return the lines for the user."""
    try:
        numbers = attempts(directory)
        counts = []
        for number in numbers:
            write_manifest(attempt_directory(directory, number))
            counts.append(len(ranks_in(attempt_directory(directory, number))))
        finish_run(directory, ended_ns)
    except (TracekitError, OSError) as error:
        return [f"the segments in {directory} may be incomplete: {error}"]
    if not any(counts):
        return [why_nothing_was_recorded(directory)]
    several = f" in each of {len(numbers)} attempts" if len(numbers) > 1 else ""
    return [
        f"recorded {max(counts)} ranks{several}",
        f"next, where tracekit is installed: tracekit import {shlex.quote(str(directory))}",
    ]


#: Number of consecutive steps that `--overhead` records, and then leaves out.
OVERHEAD_STEPS = 10
#: Below this limit, segments would be replaced all the time, bytes.
SMALLEST_KEPT = 1_000_000
#: Words for events of NCCL.
_EVENTS = {
    "coll": NcclEvent.COLL,
    "p2p": NcclEvent.P2P,
    "kernel": NcclEvent.KERNEL_CH,
    "proxy": NcclEvent.PROXY_OP | NcclEvent.PROXY_STEP,
}
_STEPS = re.compile(r"(\d*):(\d*)$")


def stacks_allowed() -> bool:
    """Whether a watch may ask for lines of code, where no option says so: unless $TRACEKIT_STACKS is 0."""
    return os.environ.get("TRACEKIT_STACKS") != "0"


def parse_steps(text: str) -> tuple[int, int | None]:
    """`100:200`, `100:` or `:200` -> first step and exclusive last step, None if open."""
    match = _STEPS.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a step range; write 100:200 for steps 100 to 199")
    first, last = int(match.group(1) or 1), int(match.group(2)) if match.group(2) else None
    if last is not None and last <= first:
        raise ValueError(f"{text!r} contains no step; the second number must be larger than the first")
    return first, last


def parse_size(text: str) -> int:
    """`500MB`, `2GB` or `1TB` -> bytes, by powers of ten."""
    size = bytes_of(text)
    if size is None:
        raise ValueError(f"{text!r} is not a size; write it like 500MB or 2GB")
    if size < SMALLEST_KEPT:
        raise ValueError(f"{text!r} is too small; keep at least {SMALLEST_KEPT // 1_000_000}MB per rank")
    return size


def parse_mask(text: str) -> int:
    """A mask from `coll,p2p,kernel,proxy`, or a number as NCCL writes it. Raises ValueError."""
    if re.fullmatch(r"0[xX][0-9a-fA-F]+|\d+", text):
        mask = int(text, 0)
        if not mask or mask & ~int(sum(_EVENTS.values())):
            raise ValueError(f"{text}: expected bits of {int(sum(_EVENTS.values())):#x}")
        return mask
    words = text.split(",")
    if unknown := [word for word in words if word not in _EVENTS]:
        raise ValueError(f"{unknown[0]!r} is not an NCCL event; known: {', '.join(_EVENTS)}")
    mask = NcclEvent(0)
    for word in words:
        mask |= _EVENTS[word]
    return int(mask)


def schedule_options(
    steps: tuple[int, int | None], every: int, length: int, *, idle: bool, overhead: bool
) -> RecordingSchedule:
    """The steps to record, from the options about steps. Raises SelectionError if they exclude each other."""
    if length > every:
        raise SelectionError(f"--for {length} is larger than --every {every}; lower --for, or leave both out")
    if idle and (every > 1 or steps != (1, None)):
        raise SelectionError("--idle records only what `tracekit attach` asks for; leave out --steps and --every")
    if overhead and (every > 1 or idle):
        raise SelectionError("--overhead chooses the steps to record itself; leave out --every and --idle")
    if idle:
        return IDLE
    if overhead:
        every, length = 2 * OVERHEAD_STEPS, OVERHEAD_STEPS
    return RecordingSchedule(steps[0], steps[1], every, length)
