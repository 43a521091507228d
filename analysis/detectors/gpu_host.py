"""What the host of a GPU does while the GPU is idle, from a recording of torch.profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.gpu_time import (
    GPU_TIME,
    MOST_NAMES,
    MOST_OF_A_KIND,
    candidate,
    costly,
    idle_s,
    of_part,
    on_each,
    plain,
    share_of,
)
from tracekit.analysis.detectors.late_rank import rank_behind
from tracekit.analysis.evidence.gpu_losses import (
    HOST_TIME,
    computes_on_host,
    host_time,
    idle_gpu,
    in_head,
    launch_latency_s,
    leads,
    unnamed_saves,
    waiting_calls,
    without_waits,
)
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.gpu.pace import Part
from tracekit.analysis.numeric.arrays import Bools, numbered
from tracekit.analysis.whatif.interventions import AddTime, Intervention, LessTime, Together
from tracekit.base.text import code_name, counted, seconds
from tracekit.report.finding import Figure, LossKind, Place, Spent, Unit, confidence_from
from tracekit.report.hardware import GpuTimes
from tracekit.trace.facts import Fact
from tracekit.trace.gpu_activity import IdleReason
from tracekit.trace.op import OF_TORCH

if TYPE_CHECKING:
    from tracekit.analysis.gpu.recorded import HostActivity

#: So many functions before the first op are told.
_MOST_TOLD = 3
#: Names of functions and modules, also if redacted, and of operators; others are annotations.
_FUNCTION = re.compile(r"\.pyx?\(\d+\): |^<|^nn\.Module: |^\w+::|^function \d")


class SyncCalls(Detector):
    """A rank waits for its GPU in calls that its peers do not make, so it cannot launch ahead.

    Paper: not seen, because host calls are not traced. tracekit replays the recording without the extra calls: their
    host goes on at once, and the GPU finds the next kernels launched.
    """

    kind = "sync-calls"
    title = "A rank waits for its GPU more often than its peers"
    signature = "synchronising calls of one rank beyond those of its peers, after which its kernels are launched late"
    refuted_by = "the calls wait for what the peers wait for elsewhere"
    next_check = "which lines call .item(), .cpu() or print tensors on this rank (torch.cuda.set_sync_debug_mode)"
    suggested_fix = "remove the calls that wait for the GPU on {ranks}: .item(), .cpu(), printing of tensors"
    part = "host"
    loss = LossKind.HOST
    stragglers_where_few = True
    repair = Repair("remove-sync-calls", "Remove the calls that wait for the GPU", "none that its peers do not make")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        yield from self._in_one_gpu(job)
        late = rank_behind(job, Part.SYNC_CALLS)
        if late is not None:
            effect = f"waits for its GPU in {late.ops:,} calls, its peers in {late.usual_ops:,}"
            yield late.candidate(self.kind, effect, freed=True)

    def _in_one_gpu(self, job: RecordingSubject) -> Iterator[Candidate]:
        """The calls that wait, by operator and line, from the recording of one rank."""
        if idle_gpu(job) is None:
            return
        waiting = waiting_calls(job, allocates=False)
        rows, waited_s = waiting.rows, waiting.waited_s
        if not len(rows):
            return
        table = waiting.table
        place = numbered(table["name"], table["operator"], table["own"])
        by_place = np.bincount(place, waited_s)
        saving = _saving(job)
        for number in np.argsort(-by_place, kind="stable")[:MOST_OF_A_KIND].tolist():
            if share_of(job, by_place[number]) < GPU_TIME.share:
                return
            of_place = rows[place == number]
            if 2 * np.count_nonzero(saving[of_place - 1]) > len(of_place):
                continue  # a checkpoint is to be written elsewhere, which needs what it waits for
            call, op, line = table.row(int(np.flatnonzero(place == number)[0]))
            calls = np.zeros(job.ops.height, np.bool_)
            calls[of_place] = True
            name = op or call
            where = f" at {code_name(line)}" if line else ""
            names, waited = tuple(text for text in (op, call) if text), float(by_place[number])
            yield candidate(
                self.kind,
                job,
                Spent(IdleReason.SYNCHRONISE, name, line or "", names, len(of_place), waited),
                f"{code_name(name)}{where} waits for the GPU {counted(len(of_place), 'time')}, {on_each(job, waited)}",
                Together((_without_dispatch(job, op, line), without_waits(job, calls))),
                title="The host waits for the GPU",
                next_check="torch.cuda.set_sync_debug_mode('warn') names the lines",
                suggested_fix=plain(
                    f"do without {code_name(name)}{where} in the loop, if nothing branches on the value: keep it on the"
                    " GPU, log every N steps, copy with non_blocking=True"
                ),
            )


#: Operators that only read a value of the GPU, and what they are called by.
_READS = {"aten::_local_scalar_dense": "aten::item", "aten::item": "aten::item"}


def _saving(job: RecordingSubject) -> Bools:
    """Which host ops mostly write checkpoints, [ops]; a call that waits follows its own."""
    work = host_time(job)
    saves = work.mask(IdleReason.CHECKPOINT) | unnamed_saves(job)
    spent_s = (np.bincount(work.op[mask], work.seconds[mask], job.ops.height) for mask in (saves, ~saves))
    return np.greater(*spent_s)


def _without_dispatch(job: RecordingSubject, op: str | None, line: str | None) -> Intervention:
    """Return the job without the host work of an operator at a line, if it only reads a value, and without the Python
    of a function that launches nothing, as a hook that waits to take the time; else as it is.
    """
    work, names = host_time(job), {op, _READS[op]} if op in _READS else set()
    only_waits = False
    if line and "own" in job.ops.columns:
        launching = job.ops["own"].gather(np.unique(work.launched_by[work.launched_by >= 0]))
        only_waits = not launching.cast(pl.String).eq(line).any()

    def belongs(activity: HostActivity) -> bool:
        is_named = activity.name.rpartition(" in ")[2] in names or (only_waits and activity.reason == IdleReason.PYTHON)
        return activity.where == (line or "") and is_named

    return work.less(work.mask(*IdleReason, where=belongs))


class GpuAllocation(Detector):
    """The host allocates or frees memory of the GPU, which torch's caching allocator avoids once it is warm.

    Paper: not seen, because host calls are not traced. tracekit replays the recording without the calls, which neither
    take time nor wait for the GPU then. What only the first of them takes longer is warm-up.
    """

    kind = "gpu-allocation"
    title = "The host allocates memory of the GPU"
    signature = "calls such as cudaMalloc and cudaFree between launches"
    refuted_by = "the calls go after a few steps of warm-up"
    next_check = "torch.cuda.memory_stats(): num_alloc_retries, segments allocated and freed in steady state"
    suggested_fix = (
        "keep memory in torch's cache: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, fixed shapes, the largest ones"
        " first, no torch.cuda.empty_cache() in the loop"
    )
    loss = LossKind.HOST
    repair = Repair("no-allocation", "Allocate memory once, before the loop")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        if idle_gpu(job) is None:
            return
        waiting = waiting_calls(job, allocates=True)
        work = host_time(job)
        parts = np.flatnonzero(work.mask(IdleReason.ALLOCATION))
        once_s = np.bincount(work.op, work.first_excess_s, job.ops.height).astype(np.float64)
        taken_s = max(float((waiting.waited_s - once_s[waiting.rows]).sum()), float(work.steady_s[parts].sum()))
        named = list(work.by_name(IdleReason.ALLOCATION))
        names = tuple(dict.fromkeys(name for part in named for name in part.names)) or tuple(waiting.names)
        if not names or share_of(job, taken_s) < GPU_TIME.share:
            return
        where = named[0].where if named else ""
        others_s = np.where(work.mask(IdleReason.ALLOCATION) & ~waiting.calls[work.op], work.steady_s, 0.0)
        change = Together((without_waits(job, waiting.calls, once_s), work.less_s(others_s)))
        more = f" and {len(names) - 1} more take" if len(names) > 1 else " takes"
        yield candidate(
            self.kind,
            job,
            Spent(IdleReason.ALLOCATION, names[0], where, names, max(len(waiting.rows), len(parts)), taken_s),
            f"{code_name(names[0])}{more} {on_each(job, taken_s)}: memory of the GPU is allocated in the loop",
            change,
        )


def _function(activity: HostActivity) -> str:
    """The own function that work is inside, or what it is where no stack was recorded."""
    return activity.where or activity.name


def _action(name: str, to: str) -> str:
    """What to do about a function, or about an annotation: of that, the functions inside have to be known first."""
    if _FUNCTION.search(name):
        return f"move {code_name(name)} {to}"
    fused = "use a fused or foreach optimizer; " if name.startswith("Optimizer.step") else ""
    return f"{fused}record with_stack=True to see which functions in {code_name(name)} take the time"


class PythonCode(Detector):
    """A function of Python takes time in which the GPU has nothing to do.

    Paper: not seen. tracekit replays the recording with its own time gone; callees that are operators keep theirs.
    """

    kind = "python-code"
    title = "The GPU waits for Python"
    signature = "time of a Python function, outside of operators and calls of the runtime, while the GPU is idle"
    refuted_by = "the function takes as long, and the GPU idles no longer, without the profiler's with_stack"
    next_check = "py-spy record on the process, without the profiler: recording stacks makes Python slower"
    suggested_fix = "move it out of the loop or to the GPU, or cache what it returns"
    loss = LossKind.HOST
    repair = Repair("no-python-between", "Take the function out of the way of launches")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        gpu = idle_gpu(job)
        if gpu is None:
            return
        yield from self._before_first(job)
        work = host_time(job)
        saves = unnamed_saves(job)
        parts = work.by_name(IdleReason.PYTHON, key=_function, among=~saves)
        later = (part for part in parts if not in_head(job)[part.parts].all())
        for part in costly(job, later):
            name = part.where or part.name
            inside = f", in {code_name(part.name)}" if part.name not in {"", name} else ""
            yield candidate(
                self.kind,
                job,
                Spent(IdleReason.PYTHON, part.name or name, part.where, part.names, part.count, part.seconds),
                f"{code_name(name)} takes {on_each(job, part.seconds)} between launches{inside}",
                work.less(part.parts),
                suggested_fix=plain(
                    f"let torch.compile or a CUDA graph spare the Python of {code_name(name)}, or call it less often"
                    if _FUNCTION.search(name) and part.seconds < HOST_TIME.dispatch_s * part.count
                    else _action(name, "out of the loop or to the GPU, or cache what it returns")
                ),
            )
        yield from self._unnamed(job, gpu)

    def _before_first(self, job: RecordingSubject) -> Iterator[Candidate]:
        """What the host does only before the first op of the GPU, but for waits and calls of the runtime."""
        work, reasons = host_time(job), (IdleReason.PYTHON, IdleReason.OPERATOR)
        only = (part for part in work.by_name(*reasons, key=_function) if in_head(job)[part.parts].all())
        parts = [*islice(only, MOST_NAMES)]
        taken_s = sum(part.seconds for part in parts)
        if not parts or share_of(job, taken_s) < GPU_TIME.share:
            return
        longest = ", ".join(
            f"{code_name(part.where or part.name)} {seconds(part.seconds)}" for part in parts[:_MOST_TOLD]
        )
        first, rows = parts[0], np.concatenate([part.parts for part in parts])
        names = tuple(dict.fromkeys(name for part in parts for name in (part.where, *part.names) if name))
        reason = work.activities[work.activity[first.parts[0]]].reason
        yield candidate(
            self.kind,
            job,
            Spent(reason, first.name or first.where, first.where, names, sum(part.count for part in parts), taken_s),
            f"before its first op, the GPU waits {on_each(job, taken_s)} for {longest}",
            work.less(rows),
            title="The GPU waits for its first op",
            suggested_fix=plain(
                _action(
                    first.where or first.name,
                    "to the loader's workers or to the GPU, or do it while the GPU still works on the batch before",
                )
            ),
        )

    def _unnamed(self, job: RecordingSubject, gpu: GpuTimes) -> Iterator[Candidate]:
        """Python without a name or a line."""
        work = host_time(job)
        unnamed = work.mask(IdleReason.PYTHON, where=lambda activity: not activity.name and not activity.where)
        parts = np.flatnonzero(unnamed & ~unnamed_saves(job))
        taken_s = float(work.seconds[parts].sum())
        if gpu.stacks or share_of(job, taken_s) < GPU_TIME.unnamed_share:
            return
        tell = "no stack was recorded: record with_stack=True to see which functions it is"
        yield candidate(
            self.kind,
            job,
            Spent(IdleReason.PYTHON, "Python without a name", "", (), len(parts), taken_s, tell),
            f"Python outside of any operator takes {on_each(job, taken_s)}; which function cannot be told without"
            " stacks",
            work.less(parts),
            suggested_fix="record with_stack=True (torch.profiler) to see which functions take the time",
            bound=True,
        )


class HostOperators(Detector):
    """An operator that launches nothing takes long on the host each time: it computes there, or compiles.

    Paper: not seen. tracekit replays the recording without its own time.
    """

    kind = "host-operator"
    title = "An operator works on the host while the GPU waits"
    signature = "an operator that takes a millisecond or more of the host each time, and launches nothing"
    refuted_by = "it is faster in later steps: then it was warm-up"
    next_check = "where its tensors live, and whether it compiles"
    suggested_fix = "run it on the GPU, or once before the loop"
    loss = LossKind.HOST
    repair = Repair("no-host-operator", "Take the operator off the launching thread")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        if idle_gpu(job) is None:
            return
        work, long = host_time(job), computes_on_host(job)
        taken_s = float(work.steady_s[long].sum())
        if share_of(job, taken_s) < GPU_TIME.share:
            return
        named = list(work.by_name(IdleReason.OPERATOR, among=long))
        names = tuple(part.name for part in named[:MOST_NAMES])
        more = f" and {len(named) - 1} more work" if len(named) > 1 else " works"
        at_most_s = float(np.max(work.steady_s[long] / work.pieces[long]))
        yield candidate(
            self.kind,
            job,
            Spent(IdleReason.OPERATOR, names[0], named[0].where, names, int(work.pieces[long].sum()), taken_s),
            f"{code_name(names[0])}{more} {on_each(job, taken_s)} on the host, up to {seconds(at_most_s)} at a time",
            work.less_s(np.where(long, work.steady_s, 0.0)),
            suggested_fix=plain(f"run {code_name(names[0])} on the GPU, or once before the loop"),
        )


#: So many operators are named.
_MOST_LAUNCHERS = 16
_MOST_REASONS = 3
_OF_LOADER = (IdleReason.LOADER,)
_OF_LAUNCHES = (IdleReason.OPERATOR, IdleReason.RUNTIME_CALL, IdleReason.LAUNCH_CALL, IdleReason.LAUNCH_LATENCY)


def launch_bound(kind: str, job: RecordingSubject) -> Iterator[Candidate]:
    """Yield where a recording waits for launches. `kind`: of the findings."""
    gpu = idle_gpu(job)
    if gpu is not None:
        yield from _in_one_gpu(kind, job, gpu)
    if not job.shows(Fact.RANKS) or not leads(job, LossKind.HOST):
        return
    idle_s = job.idle_s
    share = idle_s / job.recorded_s
    yield Candidate(
        kind,
        Place(),
        f"every GPU is idle for at least {share:.0%} of the recording{_idle_reasons(job)}",
        (Figure("idle, over the recording", share, VERDICT.headline_share, Unit.SHARE),),
        confidence_from((Figure("idle", share, VERDICT.headline_share),)),
        AddTime(-idle_s),
        bound=True,
        title="The GPUs are idle",
        next_check="a timeline of the hosts' threads while the GPUs are idle (`tracekit store export`); py-spy",
        suggested_fix=(
            "see to what the hosts do meanwhile, as the other findings price it; launch fewer and larger kernels"
            " (torch.compile, CUDA graphs) or give the data loader more workers"
        ),
    )


def _in_one_gpu(kind: str, job: RecordingSubject, gpu: GpuTimes) -> Iterator[Candidate]:
    """Dispatch of operators and launches, from the recording of one rank."""
    work = host_time(job)
    dispatch = work.mask(IdleReason.OPERATOR, IdleReason.RUNTIME_CALL) | work.mask(
        IdleReason.PYTHON, where=lambda activity: OF_TORCH.match(activity.name) is not None
    )
    short = work.seconds < HOST_TIME.dispatch_s * work.pieces
    dispatch &= ~in_head(job) & (short | work.mask(IdleReason.OPERATOR)) & ~computes_on_host(job)
    taken_s = float(work.steady_s[dispatch].sum())
    opened_s = gpu.idle_opened_by
    if opened_s.get("synchronise", 0.0) > opened_s.get("host", 0.0):
        return  # the host falls behind because it waited: the waits are to be removed
    if share_of(job, taken_s) < GPU_TIME.share:
        return
    named = [part for part in work.by_name(IdleReason.OPERATOR) if dispatch[part.parts].any()]
    names = tuple(part.name for part in named[:_MOST_LAUNCHERS])
    longest = f", longest of {code_name(names[0])} ({on_each(job, named[0].seconds)})" if names else ""
    launch = gpu.launch
    waits, loader = _without_waits(job), _without_loader(job)
    changes = [change for change in (waits, loader) if change is not None]
    first: tuple[str, ...] = () if waits is None else ("sync-calls", "gpu-allocation")
    if loader is not None and _idle_s(gpu, *_OF_LOADER) > _idle_s(gpu, *_OF_LAUNCHES):
        first += ("late-data-loading",)
    tell = None if repeats(job) else "steps launch different work, which no CUDA graph can repeat"
    yield candidate(
        kind,
        job,
        Spent("launch-bound", names[0] if names else "launches", "", names, launch.calls, taken_s, tell),
        f"the GPU waits for dispatch and launch{longest}: {launch.short_kernels:,} of {launch.kernels:,} kernels"
        " are shorter than 10 us",
        Together(
            (
                work.less_s(np.where(dispatch, work.steady_s, 0.0)),
                LessTime(np.zeros(len(work.called_s)), launch_latency_s(job)),
            )
        ),
        bound=tell is not None,
        after=Together(tuple(changes)) if changes else None,
        follows=first,
        title="The GPU waits for launches",
        next_check="torch.compile on the model: are the gaps gone?",
        suggested_fix=(
            "launch less: torch.compile(mode='reduce-overhead') or CUDA graphs, a fused or foreach optimizer, a"
            " larger batch"
        ),
    )


def _without_waits(job: RecordingSubject) -> Intervention | None:
    """The job without the calls that wait for the GPU, if steps have several: a CUDA graph can hold none of them."""
    waiting = [waiting_calls(job, allocates=allocates) for allocates in (True, False)]
    calls = waiting[0].calls | waiting[1].calls
    return without_waits(job, calls) if np.count_nonzero(calls) > job.steps_in_whole else None


def _without_loader(job: RecordingSubject) -> Intervention | None:
    """The job without its data loader, if it has one.

    A host that launches at once runs ahead of the GPU, and hides the loader: that is no time that launches take.
    """
    loads = host_time(job).mask(IdleReason.LOADER)
    return host_time(job).less(loads) if loads.any() else None


def _idle_s(gpu: GpuTimes, *reasons: IdleReason) -> float:
    """How long the GPU is idle for these reasons, before its first op too, seconds."""
    idle_s = sum(idle.seconds for idle in gpu.idle_by_reason if idle.reason in reasons)
    return idle_s + sum(gpu.before_first.by_reason.get(reason, 0.0) for reason in reasons)


def _idle_reasons(job: RecordingSubject) -> str:
    """What the host of the rank that is idle least does meanwhile, in words."""
    gpu = job.gpu
    reasons = () if gpu is None else gpu.idle_by_reason[:_MOST_REASONS]
    if gpu is None or not reasons:
        return ""
    named = [f"{row.reason} {row.seconds / job.recorded_s:.0%}" for row in reasons]
    return f", that of rank {gpu.rank} for {', '.join(named)}"


@evidence(RecordingSubject)
def repeats(job: RecordingSubject) -> bool:
    """Whether most marked steps launch the same kernels in the same order; of one step, nothing else is known."""
    if "profiler_step" not in job.ops.columns:
        return True
    ops = job.ops.select("role", "profiler_step", "name")
    gpu = ops.filter(pl.col("role") == "gpu", pl.col("profiler_step").is_not_null())
    name, step = numbered(gpu["name"]), gpu["profiler_step"].to_numpy()
    order = np.argsort(step, kind="stable")
    steps = Counter(names.tobytes() for names in np.split(name[order], np.flatnonzero(np.diff(step[order])) + 1))
    return len(steps) < 2 or 2 * max(steps.values()) >= steps.total()


def checkpoints_on_host(kind: str, job: RecordingSubject) -> Iterator[Candidate]:
    """Yield checkpoints that the training thread writes, by the functions around its work. `kind`: of the findings."""
    work = host_time(job)
    if idle_gpu(job) is None:
        return
    for part in costly(job, work.by_name(IdleReason.CHECKPOINT, key=lambda activity: activity.where or activity.name)):
        line = f" at {code_name(part.where)}" if part.where else ""
        effect = f"the host writes checkpoints in {code_name(part.name)}{line}: {on_each(job, part.seconds)}"
        yield of_part(kind, job, part, IdleReason.CHECKPOINT, effect, **_WRITES)
    unnamed = unnamed_saves(job) & work.mask(IdleReason.PYTHON)
    taken_s = float(work.seconds[unnamed].sum())
    if share_of(job, taken_s) >= GPU_TIME.share:
        tell = "no stack was recorded: record with_stack=True to see whether it is a checkpoint"
        yield candidate(
            kind,
            job,
            Spent(IdleReason.CHECKPOINT, "copies to the host", "", (), int(unnamed.sum()), taken_s, tell),
            f"tensors are copied to the host in a row, which then works {on_each(job, taken_s)} outside of any"
            " operator, as it does to write a checkpoint",
            work.less(unnamed),
            bound=True,
            **_WRITES,
        )


#: What is said of checkpoints that the training thread writes; copies from the GPU stay.
_WRITES = {
    "title": "The GPU waits for checkpoints",
    "next_check": "how long the write takes, and to which storage",
    "suggested_fix": (
        "write checkpoints in the background: torch.distributed.checkpoint.async_save, or copy to pinned memory and let"
        " a thread write; and write them less often"
    ),
}


def late_loader(kind: str, job: RecordingSubject) -> Iterator[Candidate]:
    """Yield the loader that the GPU waits for, from the recording of one rank."""
    gpu = idle_gpu(job)
    if gpu is None:
        return
    for part in costly(job, host_time(job).by_name(IdleReason.LOADER)):
        waits_s = idle_s(gpu, part.names, (IdleReason.LOADER,)) * len(job.ranks)
        single = "SingleProcess" in part.name
        workers = "its name says that it has none: give it num_workers" if single else "more num_workers"
        yield of_part(
            kind,
            job,
            part,
            IdleReason.LOADER,
            f"the GPU waits {share_of(job, waits_s):.0%} of the recording for {code_name(part.name)}",
            title="The GPU waits for the data loader",
            suggested_fix=f"let the loader work ahead ({workers}, prefetch_factor), with pin_memory=True",
        )


def collections_between_launches(kind: str, job: RecordingSubject) -> Iterator[Candidate]:
    """Yield the collections of garbage in the recording of one rank; none if none were recorded."""
    advice = "gc.freeze() after the model is built, gc.disable(), and gc.collect() every N steps"
    for part in costly(job, host_time(job).by_name(IdleReason.GC)) if idle_gpu(job) else ():
        effect = f"Python collects garbage for {on_each(job, part.seconds)} between launches"
        yield of_part(kind, job, part, IdleReason.GC, effect, suggested_fix=advice)
