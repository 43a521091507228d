"""What the time of a GPU goes to, from a recording of torch.profiler: copies, recomputation, waits, idle time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.evidence.gpu_losses import (
    HOST_TIME,
    HostPart,
    exposed_communication_s,
    gpu_alone,
    host_time,
    idle_gpu,
    leads,
    unseen_head_s,
    without_waits,
)
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.gpu.roofline import Card, work_of
from tracekit.analysis.graph.op_graph import Why
from tracekit.analysis.numeric.arrays import Ints, numbered
from tracekit.analysis.whatif.interventions import AddTime, Intervention, LessTime, Together
from tracekit.base.text import code_name, seconds, three_digits
from tracekit.report.finding import Figure, LossKind, Place, Spent, Unit, confidence_from
from tracekit.report.hardware import GpuTimes, NamedTime
from tracekit.trace.gpu_activity import IdleReason, KernelClass

#: The operator of the reentrant kind, whose backward both repeats the forward and computes gradients.
_REENTRANT = "CheckpointFunctionBackward"
#: At most so many findings of one kind, and names in each.
MOST_OF_A_KIND, MOST_NAMES = 3, 8


class GpuTimeThresholds(Struct, frozen=True):
    """When time of a recording of torch.profiler is named."""

    #: Share of the recording. Benchmark `one-gpu`: injections from 1 % on are to be found, what is less is not.
    share: float = 0.01
    #: The same of idle time that the recording does not explain. Chosen: it has no price.
    unseen_share: float = 0.05
    #: The same of Python without a name. Chosen: nobody can act upon it.
    unnamed_share: float = 0.05
    #: What pinned memory reaches where the card is not known, bytes a second. Chosen: PCIe 4 with 16 lanes.
    usual_link_s: float = 24e9


GPU_TIME = GpuTimeThresholds()


class SlowCopies(Detector):
    """Data crosses from pageable memory: the driver copies it twice, and the host waits.

    Paper: not seen. tracekit replays the recording with these copies at the speed of the card's link, and with no call
    that waits for them.
    """

    kind = "slow-copies"
    title = "Copies go through pageable memory"
    signature = "copies from or to pageable memory, below the speed of the link"
    refuted_by = "copies from pinned memory take as long"
    next_check = "where the tensors come from: pin_memory=True in the loader, non_blocking=True in .to()"
    suggested_fix = "pin the memory (pin_memory=True), copy with non_blocking=True, and prefetch the next batch"
    loss = LossKind.INPUT
    repair = Repair("pinned-copies", "Copy from pinned memory, ahead of use", "the speed of the link")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        ops = job.ops
        if idle_gpu(job) is None or "bytes" not in ops.columns:
            return
        wanted = (
            ops["role"].eq("gpu")
            & ops["name"].cast(pl.String).str.contains("Pageable")
            & ops["bytes"].fill_null(0).gt(0)
        )
        copies = np.flatnonzero(wanted.fill_null(value=False).to_numpy())
        moved, spent_s = ops["bytes"].gather(copies).to_numpy(), ops["duration"].gather(copies).to_numpy()
        calls = np.zeros(ops.height, np.bool_)
        if "copied" in ops.columns:
            calls = ops["copied"].is_in(copies).fill_null(value=False).to_numpy()
        waited_s = float(ops["duration"].to_numpy()[calls].sum())
        seconds_all = float(spent_s.sum()) + waited_s
        if not len(copies) or share_of(job, seconds_all) < GPU_TIME.share:
            return
        card = Card.named(job.summary.gpu)
        saved_s = np.zeros(ops.height)
        saved_s[copies] = np.maximum(spent_s - moved / (card.link_s if card else GPU_TIME.usual_link_s), 0.0)
        speed = float(moved.sum()) / (float(spent_s.sum()) or np.inf) / 1e9
        names = tuple(ops["name"].gather(copies).unique().sort().to_list())
        yield candidate(
            self.kind,
            job,
            Spent("transfer", names[0], "", names, len(copies), seconds_all),
            f"{three_digits(float(moved.sum()) / 1e6)} MB cross from or to pageable memory in"
            f" {on_each(job, float(spent_s.sum()))}, {three_digits(speed)} GB/s",
            Together((without_waits(job, calls), LessTime(saved_s))),
        )


class Recompute(Detector):
    """The backward repeats a part of the forward to save memory.

    Paper: not seen. tracekit replays the recording without the ops that Python launched from inside the recomputation
    of `torch.utils.checkpoint`, on GPU and host, and adds up the outputs that would have to be kept.
    """

    kind = "recompute"
    title = "The backward repeats the forward"
    signature = "ops launched from inside the recomputation of torch.utils.checkpoint"
    refuted_by = "memory does not suffice without it, at any smaller batch"
    next_check = "torch.cuda.max_memory_allocated(): how much memory is left?"
    suggested_fix = "keep activations where memory allows, or repeat only what is cheap (selective checkpointing)"
    loss = LossKind.COMPUTE
    repair = Repair("no-recompute", "Keep activations instead of computing them again", assumes="memory for them")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        ops = job.ops
        if idle_gpu(job) is None or "operator" not in ops.columns:
            return
        on_gpu = ops["role"].eq("gpu").fill_null(value=False).to_numpy()
        if "recomputed" not in ops.columns:
            yield from self._unseen(job, on_gpu)
            return
        recomputed = ops["recomputed"].fill_null(value=False).to_numpy()
        rows = np.flatnonzero(recomputed & on_gpu)
        taken_s = float(ops["duration"].gather(rows).sum())
        if share_of(job, taken_s) < GPU_TIME.share:
            return
        names = _longest(job, rows)
        saved_bytes = _kept_bytes(job, rows)
        memory = (
            "record_shapes=True shows how much memory that takes"
            if saved_bytes is None
            else f"that takes at most {three_digits(saved_bytes / 1e9)} GB more"
        )
        delay_s = np.maximum(job.replay.delay_of_ops, 0.0)
        yield candidate(
            self.kind,
            job,
            Spent(self.kind, names[0], "", names, len(rows), taken_s),
            f"the backward repeats {len(rows):,} kernels of the forward, longest of {code_name(names[0])}:"
            f" {on_each(job, taken_s)}",
            LessTime(np.where(recomputed, job.pace.cost, 0.0), np.where(recomputed & on_gpu, delay_s, 0.0)),
            suggested_fix=f"{self.suggested_fix}: {memory}",
        )

    def _unseen(self, job: RecordingSubject, on_gpu: np.ndarray) -> Iterator[Candidate]:
        """Checkpointing of which the recording shows only that there is some."""
        ops, launched_by = job.ops, host_time(job).launched_by
        if "outer" not in ops.columns:
            return
        within = np.append(
            ops["outer"].cast(pl.String).fill_null("").str.contains(_REENTRANT, literal=True).to_numpy(), [False]
        )
        rows = np.flatnonzero(on_gpu & within[launched_by])
        taken_s = float(ops["duration"].gather(rows).sum())
        if share_of(job, taken_s) < GPU_TIME.share:
            return
        tell = "no stack was recorded: record with_stack=True to tell what is repeated from gradients"
        yield candidate(
            self.kind,
            job,
            Spent(self.kind, _REENTRANT, "", (_REENTRANT,), len(rows), taken_s, tell),
            f"the backward repeats a part of the forward: {on_each(job, taken_s)} are that and its gradients",
            None,
            suggested_fix="record with_stack=True (torch.profiler) to see what the backward repeats",
        )


def _longest(job: RecordingSubject, rows: Ints) -> tuple[str, ...]:
    """The operators, or kernels without one, that launched these GPU ops, longest first."""
    named = job.ops.select("operator", "name", "duration")[rows]
    named = named.select(pl.coalesce("operator", "name").alias("operator"), "duration")
    totals = named.group_by("operator").agg(pl.col("duration").sum())
    return tuple(totals.sort("duration", "operator", descending=[True, False])["operator"].head(MOST_NAMES).to_list())


def _kept_bytes(job: RecordingSubject, rows: Ints) -> float | None:
    """The bytes of what these ops write, of the step that writes most; None if no sizes were recorded.

    An operator that launches several kernels writes once; one whose name ends with _ writes into its input.
    """
    ops = job.ops
    if "inputs" not in ops.columns:
        return None
    steps = ops["profiler_step"].gather(rows).to_list() if "profiler_step" in ops.columns else [None] * len(rows)
    written: dict[int | None, float] = {}
    before: tuple[object, ...] = ()
    columns = (steps, rows.tolist(), ops["operator"].gather(rows), ops["inputs"].gather(rows))
    for step, row, op, inputs in zip(*columns, strict=True):
        same, before = (row, op, inputs) == before, (row + 1, op, inputs)
        if inputs and op and not same and not op.endswith("_"):
            written[step] = written.get(step, 0.0) + (work_of(op, *msgspec.json.decode(inputs))[2] or 0.0)
    return max(written.values(), default=None)


class StreamWaits(Detector):
    """A stream has work, and waits for an event of another stream.

    Paper: not seen. tracekit replays the recording without the dependency: at most that is saved, if the work does not
    need what the other stream did. Waits for communication are priced as such.
    """

    kind = "stream-waits"
    title = "A stream waits for another one"
    signature = "an op that was launched, and begins as an op of another stream ends whose event its stream waits for"
    refuted_by = "the op reads what the other stream wrote just before"
    next_check = "which tensors the waiting op shares with the other stream (torch.cuda.Stream.wait_stream, wait_event)"
    suggested_fix = "wait only for what the op needs, or give the other stream its work earlier"
    loss = LossKind.IDLE
    repair = Repair("no-stream-wait", "Let the streams run at the same time", assumes="they share no data")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        """See `Detector.find`; only waits that the profiler recorded count."""
        graph, ops = job.graph.ops, job.ops
        if idle_gpu(job) is None or not stream_waits_recorded(job):
            return
        end, communicates = graph.start + graph.duration, (ops["kind"] == str(KernelClass.COMMUNICATION)).to_numpy()
        event = (graph.why == Why.EVENT) & ~communicates[graph.before]
        ready = np.full(len(end), -np.inf)
        np.maximum.at(ready, graph.after[~event], end[graph.before[~event]])
        waited_s = end[graph.before] - ready[graph.after]
        since_s = graph.start[graph.after] - end[graph.before]
        waits = np.flatnonzero(event & (waited_s > 0) & (since_s <= HOST_TIME.arrival_s))
        stream = [ops["stream"].gather(side[waits]) for side in (graph.after, graph.before)]
        pair = numbered(*stream)
        by_pair = np.bincount(pair, waited_s[waits])
        for number in np.argsort(-by_pair, kind="stable")[:MOST_OF_A_KIND].tolist():
            taken_s = float(by_pair[number])
            if share_of(job, taken_s) < GPU_TIME.share:
                return
            edges = waits[pair == number]
            waiting, other = (side[int(np.flatnonzero(pair == number)[0])] for side in stream)
            removed = np.zeros(len(event), np.bool_)
            removed[edges] = True
            longest = edges[np.argsort(-waited_s[edges], kind="stable")]
            names = ops["name"].gather(graph.before[longest]).unique(maintain_order=True).to_list()[:MOST_NAMES]
            waiting_op = ops["name"][int(graph.after[longest[0]])]
            yield candidate(
                self.kind,
                job,
                Spent(IdleReason.QUEUED, names[0], "", (*names, other, waiting), len(edges), taken_s),
                f"{waiting} waits {on_each(job, taken_s)} for {other}: {code_name(waiting_op)} begins as"
                f" {code_name(names[0])} ends",
                job.pace.without_edges(removed),
                suggested_fix=plain(
                    f"let {waiting} wait only for what {code_name(waiting_op)} needs of {other}, or launch"
                    f" {code_name(names[0])} earlier"
                ),
                bound=True,
            )


@evidence(RecordingSubject)
def stream_waits_recorded(job: RecordingSubject) -> bool:
    """Whether the profiler recorded which stream waits for which."""
    return bool((job.graph.ops.why == Why.EVENT).any())


class ExposedCommunication(Detector):
    """Transfers take time that no compute hides, although all ranks are there.

    Paper: no signature; communication at its median is ideal. In pipelines the verdict names it where nothing else
    costs time; in recordings of GPUs it competes with the other losses.
    """

    kind = "exposed-communication"
    title = "Transfers that no compute hides"
    signature = "the recording gets shorter if transfers take no time once all ranks have arrived"
    refuted_by = "the same recording with the transfers overlapped takes as long"
    next_check = "bytes and bus bandwidth of the collectives (NCCL Inspector, nccl-tests); what could run meanwhile"
    suggested_fix = "overlap communication with compute, or send less (larger buckets, lower precision)"
    loss = LossKind.COMMUNICATION
    repair = Repair(
        "overlap-communication", "Hide all transfers behind compute", assumes="all transfers hidden behind compute"
    )

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        if not leads(job, self.loss):
            return
        exposed_s = exposed_communication_s(job)
        figure = Figure("exposed, over the recording", exposed_s / job.recorded_s, VERDICT.headline_share, Unit.SHARE)
        yield Candidate(
            self.kind,
            Place(),
            f"transfers that no compute hides cost {figure.value:.0%} of the recording, without the waits for"
            " late ranks",
            (figure,),
            confidence_from((figure,)),
            AddTime(-exposed_s),
            bound=True,
        )


class IdleUnseen(Detector):
    """The GPU idles although work was launched, or what launched it is not in the recording.

    Paper: not seen. It has no price: nothing shows what to take away.
    """

    kind = "idle-unseen"
    title = "The GPU is idle, and the recording does not show why"
    signature = "gaps before GPU ops that were launched long before, arrive late, or have no recorded launch"
    refuted_by = "a longer recording shows the launch, or what the op waited for"
    next_check = "a recording that begins one step earlier, with the waits of streams"
    suggested_fix = "record one step earlier, and all processes that use the GPU"
    loss = LossKind.IDLE

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        yield from self._head(job)
        gpu = gpu_alone(job)
        for idle in gpu.idle_by_reason if gpu is not None else ():
            if idle.reason not in _SENTENCES or share_of(job, idle.seconds) < GPU_TIME.unseen_share:
                continue
            why, advice = _SENTENCES[IdleReason(idle.reason)]
            if idle.reason == IdleReason.QUEUED and stream_waits_recorded(job):
                advice = "record all processes that use the GPU: no stream that it waited for was busy"
            names = tuple(row.name for row in idle.names if row.name)
            before = f" before {code_name(names[0])}" if names else ""
            yield candidate(
                self.kind,
                job,
                Spent(idle.reason, names[0] if names else "", "", names, idle.gaps, idle.seconds, f"{why}: {advice}"),
                f"the GPU is idle for {share_of(job, idle.seconds):.0%} of the recording{before}: {why}",
                None,
                next_check=advice,
                suggested_fix=advice,
            )

    def _head(self, job: RecordingSubject) -> Iterator[Candidate]:
        """The time from the launch of the first op to its start, in which the GPU did something that is not seen. It
        lies before the step without the profiler, if that is known.
        """
        gpu, unseen_s = gpu_alone(job), unseen_head_s(job)
        if gpu is None or job.unprofiled_step is not None or share_of(job, unseen_s) < GPU_TIME.unseen_share:
            return
        why = "what the GPU did before the recording is not seen"
        began = "the launch" if gpu.before_first.by_reason else "the recording, and after its launch"
        yield candidate(
            self.kind,
            job,
            Spent(IdleReason.LAUNCH_LATENCY, "before the first op", "", (), 1, unseen_s, f"{why}: {_RECORD_EARLIER}"),
            f"the GPU began its first op {seconds(unseen_s)} after {began}: {why}",
            None,
            next_check=_RECORD_EARLIER,
            suggested_fix=_RECORD_EARLIER,
        )


_RECORD_WAITS = (
    "record the waits of streams (torch.profiler's experimental_config, enable_cuda_sync_events=True), and all"
    " processes that use the GPU"
)
_RECORD_EARLIER = "record one step earlier, to see what the GPU still did; compare the clocks of host and GPU"
#: Why nothing can be told, and what to record next.
_SENTENCES = {
    IdleReason.QUEUED: ("the work was launched long before, and what it waited for is not recorded", _RECORD_WAITS),
    IdleReason.LAUNCH_LATENCY: ("the host had launched the work, and the GPU began it late", _RECORD_EARLIER),
    IdleReason.UNKNOWN: (
        "the launches of the next ops are not recorded",
        "record with activities=[CPU, CUDA] from one step earlier, and the process that launches",
    ),
}


#: So many names are told.
_MOST_WARMED_UP = 3


class WarmUp(Detector):
    """The recording contains work that happens once: a later step does not have it.

    Paper: not seen. tracekit replays the recording with the first of each kind of host work as long as the median of
    the others, calls that launch a kernel for the first time included.
    """

    kind = "warm-up"
    title = "The recording contains warm-up"
    signature = "the first of a kind of host work takes longer than all others of it"
    refuted_by = "a recording that begins some steps later has it too"
    next_check = "a recording of later steps: torch.profiler.schedule(wait=1, warmup=3, active=3)"
    suggested_fix = (
        "record later steps (torch.profiler.schedule(wait=1, warmup=3, active=3)), and see what is left; in the job,"
        " run a few steps with the real shapes before anything that counts"
    )
    loss = LossKind.HOST
    repair = Repair("warm-up-before", "Do once-only work before what counts")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        if idle_gpu(job) is None:
            return
        work = host_time(job)
        excess_s, called_s = work.first_excess_s, work.first_call_excess_s(first_launches(job))
        total_s = float(excess_s.sum() + called_s.sum())
        if share_of(job, total_s) < GPU_TIME.share:
            return
        by_name: dict[tuple[str, str, str], float] = {}
        for part in np.flatnonzero(excess_s).tolist():
            activity = work.activities[work.activity[part]]
            key = (activity.reason, activity.name, activity.where)
            by_name[key] = by_name.get(key, 0.0) + float(excess_s[part])
        inside = job.columns("operator")["operator"]
        for row in np.flatnonzero(called_s).tolist():
            key = (str(IdleReason.LAUNCH_CALL), f"{job.ops['name'][row]} in {inside[row] or 'Python'}", "")
            by_name[key] = by_name.get(key, 0.0) + float(called_s[row])
        order = sorted(by_name, key=lambda key: -by_name[key])
        reason, name, where = order[0]
        names = tuple(dict.fromkeys(key[1] for key in order))
        change = Together((work.less_s(excess_s), work.faster_calls(called_s)))
        single = by_name[order[0]] > 0 and work.happens_once(name)
        spent = Spent(
            reason, name, where, names[:MOST_NAMES], int((excess_s > 0).sum() + (called_s > 0).sum()), total_s,
            f"{name} occurs once: a later recording would tell whether it comes back" if single else None,
        )  # fmt: skip
        activity = ", ".join(code_name(name) for name in names[:_MOST_WARMED_UP])
        effect = f"{share_of(job, total_s):.0%} of the recording is warm-up: {seconds(total_s)} in the first {activity}"
        yield candidate(self.kind, job, spent, effect, change)


@evidence(RecordingSubject)
def first_launches(job: RecordingSubject) -> Ints:
    """A number for the kernel that the call at the end of each op launches first, -1 for none, [ops]."""
    launched_by = host_time(job).launched_by
    number, gpu = np.full(len(launched_by), -1, np.int64), np.flatnonzero(launched_by >= 0)[::-1]
    number[launched_by[gpu]] = numbered(*(job.ops[name].gather(gpu) for name in ("rank", "name")))
    return number


def plain(text: str) -> str:
    """A text to put into a remedy, whose own braces are for names of places."""
    return text.replace("{", "{{").replace("}", "}}") if "{" in text else text


def idle_s(gpu: GpuTimes, names: Iterable[str], reasons: Sequence[str]) -> float:
    """How long the GPU waits for what these names say, before its first op too, seconds."""
    wanted = set(names)
    rows: list[NamedTime] = [row for idle in gpu.idle_by_reason if idle.reason in reasons for row in idle.names]
    if any(reason in gpu.before_first.by_reason for reason in reasons):
        rows += gpu.before_first.names
    return sum(row.seconds for row in rows if row.name in wanted)


def share_of(job: RecordingSubject, total_s: float) -> float:
    """The share of the recording, of time that all its ranks spend together."""
    return total_s / (job.recorded_s * len(job.ranks) or float("inf"))


def on_each(job: RecordingSubject, total_s: float) -> str:
    """Time that all ranks spend together, in words: of each, if there are several."""
    ranks = len(job.ranks)
    return seconds(total_s / ranks) + (f" on each of {ranks} ranks" if ranks > 1 else "")


def costly(job: RecordingSubject, parts: Iterable[HostPart]) -> Iterator[HostPart]:
    """Yield the few parts of host work that take a share of the recording worth naming, longest first."""
    large = (part for part in parts if share_of(job, part.seconds) >= GPU_TIME.share)
    return islice(large, MOST_OF_A_KIND)


def candidate(
    kind: str, job: RecordingSubject, spent: Spent, effect: str, change: Intervention | None, **more: Any
) -> Candidate:
    """Return the candidate of something that takes time of a recording. `more`: other fields of `Candidate`.

    `spent`: of all ranks together; the candidate has what one of them spends.
    """
    figure = Figure("over the recording", share_of(job, spent.seconds), GPU_TIME.share, Unit.SHARE)
    ranks = len(job.ranks)
    spent = replace(spent, seconds=spent.seconds / ranks, count=round(spent.count / ranks))
    return Candidate(kind, Place(), effect, (figure,), confidence_from((figure,)), change, spent=spent, **more)


def of_part(
    kind: str, job: RecordingSubject, part: HostPart, reason: IdleReason, effect: str, **more: Any
) -> Candidate:
    """Return the candidate of host work, priced by taking it away. `more`: as of `candidate`."""
    spent = Spent(reason, part.name, part.where, part.names, part.count, part.seconds)
    return candidate(kind, job, spent, effect, host_time(job).less(part.parts), **more)
