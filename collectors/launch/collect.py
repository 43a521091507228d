"""`tracekit collect` as a library: run a command, merge what its ranks recorded, store the trace.

In: `CollectOptions`. Out: `CollectSummary`, with the command's exit code even if the recording failed. Segments that
could not be merged are kept, and the summary names them.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from tracekit.base.atomic_write import check_writable
from tracekit.base.errors import OutputError, SelectionError, StoreError, TracekitError
from tracekit.base.paths import command
from tracekit.base.stderr import progress as telling
from tracekit.base.stderr import say
from tracekit.base.text import printable, short
from tracekit.collectors.launch.hang_watcher import ExplainerProcess, HangText, HangWatcher
from tracekit.collectors.launch.launcher import (
    LaunchResult,
    await_other_launchers,
    finish_run,
    launched_elsewhere,
    prepare_run,
    run_command,
    script_name,
    unharmed,
    why_nothing_was_recorded,
)
from tracekit.collectors.launch.live import WatchOptions, WatchProcess
from tracekit.collectors.merge.merge import (
    MergedAttempt,
    RankReport,
    merge_attempt,
    rank_report,
    segments_of_jobs,
    trace_of_segments,
)
from tracekit.collectors.merge.placement import LayoutOptions
from tracekit.collectors.merge.run_facts import RecordingCost, find_unrecorded, recording_cost
from tracekit.collectors.nccl.launching import Drain, nccl_lines, prepare_nccl
from tracekit.collectors.record.wire_format import (
    ENV_PLUGIN,
    IDLE,
    Category,
    Flag,
    RecordingSchedule,
    RuntimeOptions,
    attempt_directory,
)
from tracekit.collectors.run_directory.follow import read_attempt
from tracekit.collectors.run_directory.launchers import RUN_FILE, attempts, how_ended, write_manifest
from tracekit.collectors.run_directory.segments import AttemptRecording, read_clocks
from tracekit.report.findings import Findings, Unanalysed
from tracekit.store import Incoming, Store, default_store
from tracekit.trace.canonical import TRACE_FILE, Trace

#: Switches PyTorch's flight recorder on: the number of operations it keeps.
RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "2000")
#: The module that explains hangs, in a process of its own: the analysis is a layer above this one.
STANDBY = "tracekit.commands.hang"
Analyse = Callable[[Trace], Findings | Unanalysed]


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """The command and the data to keep. `keep_bytes`: maximum size of a rank's segments; 0 keeps all. `buckets`,
    `stacks`: as in `RuntimeOptions`.

    `segments`: where ranks write, shared by the nodes of a run; None makes a temporary folder. `store` None is the
    default store, `keep_in_store` False leaves it alone. `nccl`: mask of the events NCCL is to report, None for none.
    `hang_after_s`: after this long without progress, report which rank holds the job up (0: never), and stop the
    command if `stop_on_hang`. `profiler`: folder for torch.profiler's traces of `profiler_steps` steps; None records
    none. `live`: cut the run into windows while it runs, and store them instead of the whole trace. `analyse`: computes
    the results that the store keeps with the trace.
    """

    command: tuple[str, ...]
    out: Path | None = None
    store: Path | None = None
    keep_in_store: bool = True
    name: str | None = None
    segments: Path | None = None
    schedule: RecordingSchedule = field(default_factory=RecordingSchedule)
    keep_bytes: int = 0
    buckets: bool = False
    stacks: bool = True
    nccl: int | None = None
    hang_after_s: float = 0.0
    stop_on_hang: bool = False
    profiler: Path | None = None
    profiler_steps: int = 3
    layout: LayoutOptions = field(default_factory=LayoutOptions)
    live: WatchOptions | None = None
    analyse: Analyse | None = None


@dataclass(frozen=True, slots=True)
class CollectSummary:
    """The outcome of a run. `segments`: the kept segments, None if they were merged and removed.

    `profiles`: lines about the traces of torch.profiler, if they were requested. `live`: name of the job whose windows
    are in the store, None without `--live`. `unstored`: the command that stores the windows that the watch did not
    store, None if it stored all. `store`: where `live` is.
    """

    exit_code: int
    wall_s: float
    attempts: tuple[CollectedAttempt, ...]
    segments: str | None
    merged_elsewhere: bool
    problem: str | None
    profiles: tuple[str, ...] = ()
    live: str | None = None
    unstored: str | None = None
    store: str | None = None


def collect(options: CollectOptions) -> CollectSummary:
    """Run the command and collect its trace.

    Raises OutputError if the run cannot be started or its trace cannot be written, StoreError if it cannot be stored.
    A recording that cannot be merged raises nothing: it is a `problem` in the summary, because the command has run.
    """
    runtime = RuntimeOptions(
        **asdict(options.schedule),
        keep_bytes=options.keep_bytes,
        buckets=options.buckets,
        stacks=options.stacks,
        hang_after_s=options.hang_after_s,
        profiler_folder="" if options.profiler is None else str(options.profiler.absolute()),
        profiler_steps=0 if options.profiler is None else options.profiler_steps,
    )
    elsewhere = options.segments is not None and launched_elsewhere(options.segments)
    if not elsewhere:  # else the first launcher merges
        _check_targets(options)
    directory = options.segments or _temporary_folder()
    drain = Drain(directory)
    watcher: HangWatcher | None = None
    watch: WatchProcess | None = None
    unstored: str | None = None
    options = replace(options, name=_free_name(options, elsewhere))  # one name for trace, windows and hangs
    tasks: dict[str, Callable[[], object]] = {}
    try:
        environment = prepare_run(directory.absolute(), runtime, options.command)
        if options.nccl is not None:
            with unharmed("the preparation of NCCL"):
                environment, warnings = prepare_nccl(environment, options.nccl)
                _warn(warnings)
            if ENV_PLUGIN not in environment:
                options = replace(options, nccl=None)
        if options.nccl is not None:
            tasks["reading NCCL's rings"] = drain.update
        if options.live is not None and not elsewhere:
            with unharmed("the watch of the run"):
                watch = _start_watch(options, options.live, directory)
                tasks["the watch of the run"] = watch.tick
        if options.hang_after_s > 0 and not elsewhere:
            with unharmed("hang detection"):
                watcher = _hang_watcher(options, directory)
                tasks["hang detection"] = watcher.tick
                environment.setdefault(*RECORDER_SIZE)
        launched = run_command(options.command, environment, directory, tasks, str(options.name))
        if watcher is not None:
            with unharmed("hang detection"):
                watcher.command_ended(launched.exit_code)
        if watch is not None:
            with unharmed("the watch of the run"):
                unstored = watch.wait()
    except BaseException:
        if watch is not None:
            watch.terminate()
        if options.segments is None:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        with unharmed("hang detection"):
            if watcher is not None:
                watcher.explainer.close()
    with unharmed("reading NCCL's rings"):
        drain.update()
    summary = CollectSummary(
        launched.exit_code, launched.wall_s, (), str(directory), not launched.first, problem=None, unstored=unstored
    )
    if not launched.first:
        return summary
    if watcher is not None and watcher.folders and options.keep_in_store:
        with unharmed("hang detection"), contextlib.suppress(TracekitError):  # the incident stays open, visibly
            ending = how_ended(directory)
            _store(options).end_watch(str(options.name), None if ending is None else ending.words)
    try:
        return _conclude(options, directory, launched, summary)
    except Exception as error:  # the exit code is the command's all the same
        return replace(summary, problem=f"{type(error).__name__}: {error!s:.200}")


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="tracekit-"))
    except OSError as error:
        raise OutputError(
            f"no folder for the segments: {error.strerror or error}; set TMPDIR, or name one with --segments"
        ) from None


def _free_name(options: CollectOptions, elsewhere: bool) -> str:
    """The name of the job, with a number if the store already has that name: a restart must not fail because of it.

    Nor may it fail because the store cannot be used: the segments are kept until it can be.
    """
    name = job_name(options, 0, last=True)
    if not options.keep_in_store or elsewhere:
        return name
    store = _store(options)
    try:
        store.check_new(None)
        free = store.free_name(name)
    except StoreError as error:
        if options.live is None:  # else its watch reports it
            _warn([f"{error}; the run is recorded anyway, and stored at the end if the store can be used by then"])
        return name
    if free != name:
        say(f"tracekit: the store already has a job {short(name)!r}; this run is stored as {short(free)!r}")
    return free


def _start_watch(options: CollectOptions, live: WatchOptions, directory: Path) -> WatchProcess:
    """Start the process that cuts the run into windows."""
    consume = options.segments is None and options.out is None
    watch = WatchProcess(live, directory, _store(options).path, str(options.name), options.layout, consume)
    watch.start()
    return watch


def _store(options: CollectOptions) -> Store:
    return Store(options.store or default_store())


def _hang_watcher(options: CollectOptions, directory: Path) -> HangWatcher:
    """The hang watcher. Reports are written next to the trace, and kept in the store."""
    trace = options.out or (_store(options).path if options.keep_in_store else Path("trace"))
    explainer, reports = ExplainerProcess((sys.executable, "-P", "-m", STANDBY)), trace.absolute().parent
    keep = functools.partial(_keep_hang, options)
    return HangWatcher(directory.absolute(), options.hang_after_s, reports, explainer, options.stop_on_hang, keep=keep)


def _keep_hang(options: CollectOptions, report: HangText) -> None:
    """Store a report while the job hangs: it opens an incident. One that cannot be stored remains in its folder."""
    with unharmed("keeping reports on hangs"):
        try:
            if options.keep_in_store:
                _store(options).add_hang(str(options.name), report.lines, report.report)
        except TracekitError as error:
            say(f"tracekit: the report on the hang could not be stored: {printable(str(error))}")


def _check_targets(options: CollectOptions) -> None:
    """Refuse, before the command runs, targets that cannot be written. Not the store: it never stops a command."""
    if options.out is not None:
        check_writable(options.out, TRACE_FILE)
    if options.live is not None and not options.keep_in_store:
        raise SelectionError("--live stores its windows; leave out --no-store")
    if options.live is not None and options.nccl is not None:
        raise SelectionError(
            "--live analyses windows of a running job, but NCCL's events can be read only at its end; leave out --nccl"
        )
    if options.profiler is not None and options.profiler.is_dir() and any(options.profiler.iterdir()):
        raise OutputError(f"{options.profiler}: not empty; choose an empty or new folder for --profiler")


def _warn(warnings: Iterable[str]) -> None:
    """Warn, before the command starts, of likely problems."""
    for warning in warnings:
        say(f"tracekit: WARNING: {printable(warning)}")


def _conclude(
    options: CollectOptions, directory: Path, launched: LaunchResult, summary: CollectSummary
) -> CollectSummary:
    """Conclude the run: `summary` with what became of the recording."""
    problem = None
    collected: list[CollectedAttempt] = []
    numbers: list[int] = []
    if not directory.is_dir() or not ((directory / RUN_FILE).exists() or attempts(directory)):
        problem = f"{directory} was removed while the command ran, and the recording with it"
        return replace(summary, segments=None, problem=problem)
    try:
        await_other_launchers(directory)
        numbers = attempts(directory)
        if numbers and (options.live is None or options.out is not None):
            with telling() as tell:
                tell("merging what the ranks recorded")
                collected.extend(collect_attempts(options, directory, numbers))
        try:
            finish_run(directory, launched.ended_ns)
        except OutputError:
            if not collected:  # a full disk: the attempts have reported it
                raise
        if not numbers:
            problem = why_nothing_was_recorded(directory)
    except (TracekitError, OSError) as error:
        problem = str(error)
    keep = (
        options.segments is not None
        or any(attempt.problem for attempt in collected)
        or (problem and numbers)
        or summary.unstored
    )
    if not keep:
        shutil.rmtree(directory, ignore_errors=True)
    return replace(
        summary,
        attempts=tuple(collected),
        segments=str(directory) if keep else None,
        problem=problem,
        profiles=tuple(_profile_lines(options, collected)),
        live=options.name if options.live is not None and numbers else None,
        store=None if options.live is None else str(_store(options).path),
    )


def _profile_lines(options: CollectOptions, collected: Sequence[CollectedAttempt]) -> Iterator[str]:
    """The number of ranks with a trace of torch.profiler, and the command that reads the traces."""
    if options.profiler is None:
        return
    for attempt in collected:
        folder = attempt_directory(options.profiler, attempt.attempt)
        files = sorted(folder.glob("rank*_trace.json.gz"))
        if len(files) < attempt.world_size:
            ranks = f"{len(files)} of {attempt.world_size} ranks"
            yield f"WARNING: torch.profiler wrote the traces of {ranks} into {folder}"
        if files and _has_kernels(files[0]):
            yield f"traces of torch.profiler, {len(files)} ranks; next: {command('whatif', folder)}"
        elif files:
            without = f"{len(files)} ranks, without GPU ops"
            yield f"traces of torch.profiler, {without}: open those in {folder} in ui.perfetto.dev"


def _has_kernels(trace: Path) -> bool:
    """True if a trace of torch.profiler has events of the category "kernel", which `tracekit whatif` needs."""
    before = b""
    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(trace) as text:
        while chunk := text.read(1 << 20):
            if b'"kernel"' in before + chunk:
                return True
            before = chunk[-16:]
    return False


@dataclass(frozen=True, slots=True)
class CollectedAttempt:
    """One attempt of the run (an elastic restart begins another). `problem`: why there is no trace, if there is none.
    `continued`: its trace continues with the next attempt.

    `cost`: what recording costs, or why that is unknown; None if nothing could be read. `notes`: what the ranks could
    not record, one line each. `nccl`: lines about NCCL's events, if they were requested.
    """

    attempt: int
    name: str = ""
    world_size: int = 0
    steps: int = 0
    ops: int = 0
    layout: dict[str, int] | None = None
    layout_source: str | None = None
    ranks: tuple[RankReport, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    out: str | None = None
    store: str | None = None
    cost: RecordingCost | str | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()
    nccl: tuple[str, ...] = ()
    continued: bool = False


def collect_attempts(options: CollectOptions, directory: Path, numbers: Sequence[int]) -> Iterator[CollectedAttempt]:
    """Merge all attempts, and write and store a trace for each job. A problem with one does not affect the others."""
    read = [_read_attempt(options, directory, number) for number in numbers]
    jobs: dict[int, dict[str, Any]] = {}
    for segments in segments_of_jobs(merged for _, merged in read if merged is not None):
        members = [int(segment.trace.metadata["attempt"]) for segment in segments]
        fields = _keep(options, trace_of_segments(segments), members[-1], last=members[-1] == numbers[-1])
        jobs |= {member: {**fields, "continued": member != members[-1]} for member in members}
    for collected, _ in read:
        name = job_name(options, collected.attempt, last=collected.attempt == numbers[-1])
        yield replace(collected, **jobs.get(collected.attempt, {"name": name}))


def _read_attempt(
    options: CollectOptions, directory: Path, number: int
) -> tuple[CollectedAttempt, MergedAttempt | None]:
    """Merge one attempt, or report why that is impossible. Its trace has not been written yet."""
    unlisted: tuple[str, ...] = ()
    try:
        write_manifest(attempt_directory(directory, number))
    except OutputError as error:  # a full disk: the data on it can still be read
        unlisted = (f"WARNING: {error}; the trace has what was written until then",)
    try:
        recording = read_attempt(directory, number)
    except TracekitError as error:
        return CollectedAttempt(number, problem=str(error)), None
    notes = (*unlisted, *recording.left_out, *find_unrecorded(recording).lines())
    read = CollectedAttempt(
        number,
        world_size=recording.world_size,
        ranks=tuple(rank_report(recorded) for recorded in recording.ranks.values()),
        missing_ranks=recording.missing_ranks,
        notes=notes,
    )
    if options.schedule == IDLE and not _recorded_steps(recording):
        idle = "nothing was recorded: with --idle, only `tracekit attach` starts a recording"
        return replace(read, notes=(*notes, idle)), None
    read = replace(read, cost=recording_cost(recording))
    try:
        merged = merge_attempt(
            recording,
            name=str(options.name),
            first_step=options.schedule.first_step,
            options=options.layout,
            clocks=read_clocks(directory),
            metadata={"command": list(options.command)},
        )
    except TracekitError as error:
        return replace(read, problem=str(error), nccl=_nccl_lines(options, recording, None)), None
    trace = merged.trace
    read = replace(
        read,
        steps=len(trace.steps),
        ops=trace.ops.height,
        layout=trace.layout.to_dict(),
        layout_source=merged.placement.source,
        nccl=_nccl_lines(options, recording, trace.metadata.get("nccl")),
    )
    return read, merged


def _keep(options: CollectOptions, trace: Trace, attempt: int, *, last: bool) -> dict[str, Any]:
    """Write and store the trace of a job whose last attempt is `attempt`; returns the same fields of its attempts.

    `last`: the attempt is the last of the run, too.
    """
    trace = replace(trace, name=job_name(options, attempt, last=last))
    fields: dict[str, Any] = {"name": trace.name, "out": None, "store": None, "problem": None}
    out = options.out
    if out is not None and not last:
        out = out.with_name(f"{out.stem}.attempt-{attempt}{out.suffix}")
    try:
        if out is not None:
            trace.write_parquet(out)
        if options.keep_in_store and options.live is None:
            fields["store"] = str(store_trace(options, trace))
    except TracekitError as error:
        return {**fields, "problem": str(error)}
    return {**fields, "out": None if out is None else str(out)}


def _recorded_steps(recording: AttemptRecording) -> bool:
    """True if a step after the first was recorded."""
    whole = int(Flag.COMPLETE | Flag.RECORDING)
    records = np.concatenate([recorded.records for recorded in recording.ranks.values()])
    ends = records[(records["category"] == Category.STEP) & (records["step"] > 0)]
    return bool((ends["flags"] & whole == whole).any())


def _nccl_lines(options: CollectOptions, recording: AttemptRecording, report: dict[str, Any] | None) -> tuple[str, ...]:
    return () if options.nccl is None else tuple(nccl_lines(recording, report, options.nccl))


def store_trace(options: CollectOptions, trace: Trace) -> Path:
    """Add the trace and the results of its analysis to the store. Raises StoreError."""
    path = options.store or default_store()
    findings = None if options.analyse is None else options.analyse(trace)
    Store(path).check_new(trace.name)
    Store(path).add([Incoming(trace, trace.name, " ".join(options.command), findings)])
    return path


def job_name(options: CollectOptions, attempt: int, *, last: bool) -> str:
    """The requested name, else script and time; jobs before the last carry the number of their last attempt."""
    base = options.name
    if base is None:
        base = f"{script_name(options.command)}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    return base if last else f"{base}-attempt-{attempt}"
