"""The command `tracekit collect`: reads options, calls the library, reports the outcome."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tracekit.base.arguments import OUT, OUT_STORE, SectionedCommand
from tracekit.base.errors import SelectionError
from tracekit.base.paths import command
from tracekit.base.stderr import say
from tracekit.base.text import printable, ranks_text, short
from tracekit.collectors.launch.launcher import hold, release
from tracekit.collectors.launch.live import WatchOptions, watch_options
from tracekit.collectors.launch.record import parse_mask, parse_size, parse_steps, schedule_options, stacks_allowed

if TYPE_CHECKING:
    from tracekit.collectors.launch.collect import Analyse, CollectedAttempt, CollectSummary

#: Hang detection of watched jobs, unless set otherwise, seconds.
LIVE_HANG_AFTER_S = 300.0
#: The options of --help by section.
_SECTIONS = {
    "Where the recording goes": ("out", "store", "keep_in_store", "name", "segments", "keep_bytes", "as_json"),
    "What is recorded": ("steps", "every", "length", "idle", "buckets", "stacks", "nccl", "profiler", "profiler_steps",
                         "overhead"),
    "Sizes that cannot be found": ("dp", "pp", "tp", "vpp"),
    "Hangs": ("hang_after_s", "stop_on_hang"),
    "While the job runs": ("live", *WatchOptions.__slots__),
}  # fmt: skip


class Parsed(click.ParamType[Any]):
    """Text that `parse` turns into a value; it raises ValueError for text that is none. `name`: what stands for it."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command("collect", cls=SectionedCommand, sections=_SECTIONS, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--out", type=OUT, help="Also write the trace to this Parquet file.")
@click.option("--store", type=OUT_STORE, help="Store [default: $TRACEKIT_STORE, else ./tracekit.store].")
@click.option(
    "--no-store",
    "keep_in_store",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Do not write to the store; for use with --out.",
)
@click.option("--name", help="Name of the job in the store [default: script and time].")
@click.option("--segments", type=OUT, help="Folder the ranks write to; one shared folder for all nodes of a run.")
@click.option(
    "--steps", type=Parsed("FROM:TO", parse_steps), default="1:", help="Steps to record, such as 100:200 [default: 1:]."
)
@click.option("--every", type=click.IntRange(min=1), default=1, metavar="N", help="Record one step in N.")
@click.option(
    "--for", "length", type=click.IntRange(min=1), default=1, metavar="N", help="With --every: record N steps in a row."
)
@click.option("--idle", is_flag=True, help="Record nothing until `tracekit attach` asks for it.")
@click.option(
    "--keep",
    "keep_bytes",
    type=Parsed("SIZE", parse_size),
    default=0,
    help="Keep at most this much of each rank's segments, such as 2GB; the oldest go.",
)
@click.option("--buckets", is_flag=True, help="On CPUs, record each bucket of gradients, for `tracekit optimize`.")
@click.option(
    "--stacks/--no-stacks",
    default=stacks_allowed,
    help="Let a watch ask which line of code a slow rank is at [default: yes, unless $TRACEKIT_STACKS is 0].",
)
@click.option("--dp", type=click.IntRange(min=1), help="Data-parallel size, if it cannot be found.")
@click.option("--pp", type=click.IntRange(min=1), help="Pipeline-parallel size, if it cannot be found.")
@click.option("--tp", type=click.IntRange(min=1), help="Tensor-parallel size, if it cannot be found.")
@click.option("--vpp", type=click.IntRange(min=1), help="Model chunks per rank, if they cannot be found.")
@click.option(
    "--nccl",
    type=Parsed("EVENTS", parse_mask),
    is_flag=False,
    flag_value="coll,p2p,kernel",
    help="Let NCCL time communication on the GPU; any of coll,p2p,kernel,proxy [default: coll,p2p,kernel].",
)
@click.option(
    "--hang-after",
    "hang_after_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help=f"Report which rank holds the job up once no rank has made progress for this long; 0: never [default:"
    f" {LIVE_HANG_AFTER_S:.0f} with --live, else never].",
)
@click.option(
    "--on-hang",
    "stop_on_hang",
    type=click.Choice(["report", "stop"]),
    default="report",
    show_default=True,
    callback=lambda _context, _option, value: value == "stop",
    help="On a hang, only report it, or also stop the command.",
)
@click.option(
    "--profiler",
    type=OUT,
    is_flag=False,
    flag_value=Path("tracekit-profile"),
    metavar="FOLDER",
    help="Also record a few steps with torch.profiler, one file per rank [default: ./tracekit-profile].",
)
@click.option(
    "--profiler-steps", type=click.IntRange(1, 100), default=3, show_default=True, help="Steps torch.profiler records."
)
@click.option("--live", is_flag=True, help="Analyse the run window by window while it runs, as `tracekit watch` does.")
@watch_options
@click.option("--overhead", is_flag=True, help="Measure what recording costs: switch it on and off during the run.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout, after the command's output."
)
@click.pass_obj
def collect_command(
    analyse: Analyse | None,
    /,
    steps: tuple[int, int | None],
    every: int,
    length: int,
    idle: bool,
    overhead: bool,
    hang_after_s: float | None,
    live: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Record a step trace of an unmodified training command: tracekit collect [OPTIONS] -- torchrun ... train.py.

    The exit code is the command's.
    """
    # `analyse` is the object of the command line: the analysis is a layer above this one.
    watching = WatchOptions(**{name: options.pop(name) for name in WatchOptions.__slots__})
    if not live and (given := watching.given()):
        raise SelectionError(f"{given[0]} needs --live; add --live, or leave it out")
    schedule = schedule_options(steps, every, length, idle=idle, overhead=overhead)
    if hang_after_s is None:
        hang_after_s = LIVE_HANG_AFTER_S if live else 0.0
    hold()  # before the imports below: see there
    try:
        from tracekit.collectors.launch.collect import CollectOptions, collect
        from tracekit.collectors.merge.placement import LayoutOptions

        layout = LayoutOptions(**{name: options.pop(name) for name in LayoutOptions.__slots__})
        summary = collect(
            CollectOptions(
                schedule=schedule,
                hang_after_s=hang_after_s,
                layout=layout,
                live=watching if live else None,
                analyse=analyse,
                **options,
            )
        )
    finally:
        release()
    for line in summary_lines(summary):
        say(f"tracekit: {line}")
    if as_json:
        click.echo(json.dumps(asdict(summary)))
    return summary.exit_code


def summary_lines(summary: CollectSummary) -> list[str]:
    """The closing lines for the user; names and paths cannot contain line breaks."""
    lines = [line for attempt in summary.attempts for line in _attempt_lines(attempt, len(summary.attempts) > 1)]
    if summary.merged_elsewhere:
        lines.append(f"the node that started first merges the ranks; segments are in {summary.segments}")
    lines += summary.profiles
    if summary.live is not None and not summary.merged_elsewhere:
        lines.append(f"next: {command('store', 'windows', summary.live, '--store', Path(summary.store or ''))}")
    if summary.problem:
        lines.append(f"no trace: {summary.problem}")
    if summary.unstored:
        lines.append(f"windows are missing, because the watch died; store them with `{summary.unstored}`")
    if summary.segments and not summary.merged_elsewhere:
        no_layout = any("--layout" in (attempt.problem or "") for attempt in summary.attempts)
        sizes = ["--layout", "sizes.yaml"] if no_layout else []
        merge = command("import", Path(summary.segments), *sizes)
        lines.append(f"segments are kept in {summary.segments}; merge them with `{merge}`")
    if summary.exit_code:
        lines.append(f"the command ended with exit code {summary.exit_code}")
    return [printable(line) for line in lines]


def _attempt_lines(attempt: CollectedAttempt, several: bool) -> list[str]:
    lines = []
    title = f"attempt {attempt.attempt}: " if several else ""
    if attempt.layout is not None:
        sizes = " x ".join(
            f"{word} {attempt.layout[word]}" for word in ("dp", "pp", "tp", "cp") if attempt.layout[word] > 1
        )
        lines.append(
            f"{title}recorded {attempt.steps} steps, {attempt.ops} ops of {len(attempt.ranks)} of"
            f" {attempt.world_size} ranks ({sizes or 'one worker'}; from {attempt.layout_source})"
        )
    if attempt.problem:
        lines.append(f"{title}no trace: {attempt.problem}")
    if attempt.missing_ranks:
        lines.append(
            f"WARNING: {title}{ranks_text(attempt.missing_ranks, 16)} reported nothing; the trace lacks them"
            ' (see "Missing ranks" in docs/collecting.md)'
        )
    lines += [f"{title}{line}" for line in (*attempt.notes, *attempt.nccl)]
    for rank in attempt.ranks:
        if troubles := _troubles(rank):
            lines.append(f"{title}rank {rank.rank}: {', '.join(troubles)}")
    if attempt.cost is not None:
        lines.append(f"{title}{attempt.cost if isinstance(attempt.cost, str) else attempt.cost.sentence()}")
    if attempt.continued and attempt.problem is None:
        lines.append(f"{title}its trace continues with the next attempt")
    elif attempt.layout is not None and attempt.problem is None:
        lines += _where(attempt, title)
    return lines


def _where(attempt: CollectedAttempt, title: str) -> list[str]:
    """The location of the trace, and the next command to type."""
    lines = []
    if attempt.out is not None:
        lines.append(f"{title}wrote {attempt.out}")
    if attempt.store is not None:
        lines.append(f"{title}stored as {short(attempt.name)} in {attempt.store}")
        lines.append(f"next: {command('whatif', '--store', Path(attempt.store), '--job', attempt.name)}")
    elif attempt.out is not None:
        lines.append(f"next: {command('whatif', Path(attempt.out))}")
    return lines


def _troubles(rank: Any) -> list[str]:
    """Problems of one rank, in words."""
    troubles = []
    if rank.dropped:
        troubles.append(f"dropped {rank.dropped} records (ring full)")
    if rank.unfinished:
        troubles.append(f"{rank.unfinished} transfers were never waited for")
    if rank.failures:
        troubles.append("hooks failed: " + ", ".join(f"{hook} {count} x" for hook, count in rank.failures.items()))
    if rank.off:
        troubles.append(f"stopped recording ({rank.off})")
    if not rank.closed:
        troubles.append(
            f"its recording stops after {rank.steps} steps (killed, or out of disk space); the trace has what it wrote"
        )
    return troubles
