"""Ranks of an op graph for which the others wait, at what these are behind their peers; and what holds up all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.evidence.graph_subject import GraphSubject, at_pace, culprit_of, even_pace
from tracekit.analysis.evidence.subject import Subject, evidence
from tracekit.analysis.gpu.pace import PACE, Behind, Part
from tracekit.analysis.gpu.times import grid_blocks
from tracekit.analysis.graph.op_graph import Why
from tracekit.analysis.numeric.arrays import Bools, Int32s, Ints
from tracekit.analysis.whatif.interventions import Intervention, LessTime, SetOps, Together
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, LossKind, Place, Unit, confidence_from


class LaunchQueueThresholds(Struct, frozen=True):
    """When all streams seem to share one launch queue."""

    #: How long before the op launched before it began another op was ready, seconds. Chosen: more than a launch
    #: usually takes.
    ready_s: float = 20e-6
    #: Ops that could have begun earlier and did not. Statistic: were each a toss-up, one of a thousand recordings would
    #: show so many.
    fewest_chances: int = 10


LAUNCH_QUEUE = LaunchQueueThresholds()


class LateRank(Detector):
    """The others wait for a rank in their collectives, and no single part of its time is longer than theirs.

    Paper: no signature. The recording gets shorter with this rank at the pace of its peers.
    """

    kind = "late-rank"
    title = "The others wait for a rank"
    signature = "one rank comes last to collectives, and no part of its time alone is longer than its peers'"
    refuted_by = "another rank is last in a longer recording"
    next_check = "profiles of the rank and of a peer, with stacks (torch.profiler, py-spy)"
    suggested_fix = "profile {ranks} and a peer (torch.profiler, py-spy record) and take out what runs only there"
    part = "compute"

    def find(self, job: GraphSubject) -> Iterator[Candidate]:
        culprit = culprit_of(job)
        if culprit is None or culprit.behind or culprit.late_s is not None:
            return
        waited = f"the others wait {seconds(culprit.waited_s)} for it" if culprit.waited_s > 0 else "the others wait"
        yield Candidate(
            self.kind,
            Place(ranks=(culprit.rank,)),
            waited,
            (Figure("saved at the pace of its peers", culprit.saved_s, 0.0, Unit.SECONDS),),
            1 - PACE.largest_chance,
            at_pace(job, culprit.rank, freed=True),
        )


class LateStart(Detector):
    """The first recorded event of a rank is late, and with it the collectives in which the others wait.

    Paper: no signature; steps begin together. It costs time once, and the profiler may be the reason.
    """

    kind = "late-start"
    title = "A rank begins later in the recording than its peers"
    signature = "the first event of one rank is far later than those of all others, which wait for it"
    refuted_by = "a longer recording in which the rank is late again"
    next_check = "whether the profiler started later on this rank, or its first step did"
    suggested_fix = "record more steps: the profiler may only have started later on {ranks}"
    part = "host"

    def find(self, job: GraphSubject) -> Iterator[Candidate]:
        culprit = culprit_of(job)
        if culprit is None or culprit.late_s is None:
            return
        usual_s = window_s(job, culprit.rank) - culprit.late_s
        yield Candidate(
            self.kind,
            Place(ranks=(culprit.rank,)),
            f"its first recorded event is {seconds(culprit.late_s)} after those of its peers, which wait for it",
            (Figure("later than its peers", culprit.late_s, 0.0, Unit.SECONDS),),
            1 - PACE.largest_chance,
            begins(job, culprit.rank, usual_s),
        )


def window_s(job: GraphSubject, rank: int) -> float:
    """Return how late the recording of a rank begins, seconds."""
    return float(job.ops.filter(kind="window", rank=rank)["duration"].sum())


def begins(job: GraphSubject, rank: int, begin_s: float) -> Intervention:
    """Return the job in which the recording of a rank begins `begin_s` seconds after that of the job."""
    cost = job.pace.with_window(rank, begin_s)
    return SetOps(cost, cost != job.pace.cost)


class OneLaunchQueue(Detector):
    """No op begins before an op of another stream that was launched earlier, although ops were ready to.

    Paper: no signature. With CUDA_DEVICE_MAX_CONNECTIONS=1, all streams share one hardware queue: an op that waits
    holds up every op launched after it. The order of launches is then that of starts, whatever streams are free.
    """

    kind = "one-launch-queue"
    title = "One hardware queue launches the kernels of all streams"
    signature = "ops begin in the order of their launches on all streams, although some were ready earlier"
    refuted_by = "a recording with CUDA_DEVICE_MAX_CONNECTIONS=8 that takes as long"
    next_check = "CUDA_DEVICE_MAX_CONNECTIONS in the environment of the ranks"
    suggested_fix = (
        "unset CUDA_DEVICE_MAX_CONNECTIONS or set it to 8, unless the job needs the order (Megatron-LM's overlap of"
        " tensor-parallel communication); else launch the independent stream first"
    )
    loss = LossKind.HOST
    repair = Repair("more-launch-queues", "Give streams hardware queues of their own")

    def find(self, job: GraphSubject) -> Iterator[Candidate]:
        if not {"launched_by", "stream", "role", "communicates"} <= set(job.ops.columns):
            return
        ops, graph = job.ops, job.graph.ops
        communicates = ops["communicates"].fill_null(value=False).to_numpy()
        stream = ops["stream"].rank("dense").fill_null(0).to_numpy().astype(np.int64)
        before, after = graph.before, graph.after
        # Computes of different streams whose order only their times suggest.
        guessed = (graph.why == Why.INFERRED) & ~communicates[before] & ~communicates[after]
        guessed &= stream[before] != stream[after]
        end = graph.start + graph.duration
        ready = np.full(len(end), -np.inf)
        np.maximum.at(ready, after[~guessed], end[before[~guessed]])
        first, second = _neighbours(job, stream)
        certain = ~guessed & np.isin(after, second, kind="table")
        free = ~joined(first, second, before[certain], after[certain], len(end)) & np.isfinite(ready[second])
        # In one queue, an op begins no earlier than the one before it, or, if they cannot share the GPU, than its end.
        held = second[:0]
        for since, may in ((graph.start[first], free), (end[first], free & _leaves_room(job)[first])):
            chance = may & (ready[second] < since - LAUNCH_QUEUE.ready_s)
            if not (graph.start[second] < since - LAUNCH_QUEUE.ready_s)[chance].any() and chance.sum() > len(held):
                held = second[chance]
        if len(held) < LAUNCH_QUEUE.fewest_chances:
            return
        late = np.zeros(len(end), np.bool_)
        late[held] = True
        figures = (Figure("ops held up by an op launched before them", float(len(held)), 2.0, Unit.COUNT),)
        no_delay = LessTime(np.zeros(len(late)), np.where(late, np.inf, 0.0))
        yield Candidate(
            self.kind,
            Place(),
            f"all streams share one launch queue: {len(held):,} kernels were ready and waited for one of another stream"
            " that was launched before them",
            figures,
            confidence_from(figures),
            Together((job.pace.without_edges(guessed & late[after]), no_delay)),  # they begin when they are ready
            bound=True,
        )


def joined(first: Ints, second: Ints, before: Int32s, after: Int32s, ops: int) -> Bools:
    """Which pairs of rows are an edge from `before` to `after`, [pairs]. `ops`: how many rows there are."""
    return np.isin(first * ops + second, before.astype(np.int64) * ops + after)


def _neighbours(job: GraphSubject, stream: Ints) -> tuple[Ints, Ints]:
    """GPU ops of different streams that a thread launched one directly after the other."""
    ops, graph = job.ops, job.graph.ops
    launcher = ops["launched_by"].fill_null(-1).to_numpy().astype(np.int64)
    rows = np.flatnonzero(ops["role"].eq("gpu").to_numpy() & (launcher >= 0))
    launched = (graph.start + graph.duration)[launcher[rows]]
    order = rows[np.lexsort((launched, stream[launcher[rows]], graph.rank[rows]))]
    first, second = order[:-1], order[1:]
    alike = (graph.rank[first] == graph.rank[second]) & (stream[launcher[first]] == stream[launcher[second]])
    other_stream = alike & (stream[first] != stream[second])
    return first[other_stream], second[other_stream]


def _leaves_room(job: GraphSubject) -> Bools:
    """Which ops leave room for another one on the GPU, or may do so as far as their sizes were recorded, [ops]."""
    room = np.ones(job.ops.height, np.bool_)
    recording = None if job.recorded is None else job.recorded.recording
    if recording is not None and recording.multiprocessors is not None:
        blocks = recording.gpu_ops.select(grid_blocks()).to_series().fill_null(0).to_numpy()
        room[np.flatnonzero(job.ops["role"].eq("gpu").to_numpy())] = blocks < recording.multiprocessors
    return room


class RankBehind(Struct, frozen=True, eq=False):
    """A rank, and where it is behind its peers. `spent_s`, `ops`: its seconds, of the mean step or of the recording,
    and all its ops in that part of its time; `usual_s`, `usual_ops`: the median of its peers.
    """

    job: GraphSubject
    rank: int
    behind: Behind
    spent_s: float
    usual_s: float
    ops: int
    usual_ops: int

    @property
    def spent(self) -> str:
        """Its seconds in words, which say whether they are of a step."""
        return f"{seconds(self.spent_s)}{' a step' * (self.job.whole == 'step')}"

    @property
    def usual(self) -> str:
        """Those of its peers in words."""
        return seconds(self.usual_s)

    def candidate(self, kind: str, effect: str, *figures: Figure, freed: bool = False) -> Candidate:
        """Return the finding that makes it late. `freed`: without the calls in which it waits for its GPU and its
        peers do not.
        """
        job, behind = self.job, self.behind
        share = Figure(f"longer than its peers, over the {job.whole}", behind.saved_s / job.recorded_s, 0.0, Unit.SHARE)
        return Candidate(
            kind,
            Place(ranks=(self.rank,)),
            effect,
            (share, *figures),
            1 - PACE.largest_chance,
            at_pace(job, self.rank, behind.ops, freed=freed),
            series=None if job.recorded is not None else 1 + behind.saved_each_s / job.unchanged_s,
            excess=self.spent_s / self.usual_s - 1 if self.usual_s else None,
        )


def rank_behind(job: Subject, part: Part) -> RankBehind | None:
    """Return the rank that the others wait for, if it is behind them in this part of its time."""
    ranks = _ranks_behind(job)
    return None if ranks is None else ranks.get(part)


@evidence(GraphSubject)
def _ranks_behind(job: GraphSubject) -> dict[Part, RankBehind]:
    culprit = culprit_of(job)
    return {} if culprit is None else {behind.part: _of(job, culprit.rank, behind) for behind in culprit.behind}


def _of(job: GraphSubject, rank: int, behind: Behind) -> RankBehind:
    ops = job.ops.select("rank", "duration").filter(behind.ops)
    total = ops.group_by("rank").agg(seconds=pl.col("duration").sum(), ops=pl.len())
    own, peers = (total.filter(pl.col("rank").eq(rank) == itself) for itself in (True, False))
    usual_s, usual = (float(np.median(peers[name].to_numpy())) if peers.height else 0.0 for name in ("seconds", "ops"))
    steps = len(job.steps)
    spent_s = float(own["seconds"].sum()) / steps
    return RankBehind(job, rank, behind, spent_s, usual_s / steps, int(own["ops"].sum()), round(usual))


class Compared(NamedTuple):
    """`behind`: the rank. `op`: what its ops are called: "kernel" in a recording. `ratio`: how many times as long it
    takes at the ops that all ranks have. `own`, `own_s`: the number of ops that not all peers have, and the seconds
    that they take; `more`, `more_s`: how many more of the ops that all ranks have it runs than its peers in the mean,
    and the seconds that as many take on these; `uneven`: whether these two together make it late.
    """

    behind: RankBehind
    op: str
    ratio: float
    own: int
    own_s: float
    more: float
    more_s: float
    uneven: bool


@evidence(GraphSubject)
def compared(job: GraphSubject) -> Compared | None:
    """Compare the computes of the rank that stands out with those of its peers; None if it is not behind in them."""
    late = rank_behind(job, Part.COMPUTE)
    if late is None:
        return None
    peer = next((name for name in ("peer", "kind", "name") if name in job.ops.columns), "rank")
    ops = job.ops.with_columns(duration=pl.Series(even_pace(job).cost)).filter(late.behind.ops)
    ranks = ops["rank"].n_unique()
    shared = ops.with_columns(on=pl.col("rank").n_unique().over(peer))
    common, own = shared.filter(pl.col("on") == ranks), shared.filter(pl.col("on") < ranks)
    (own_s, peers_s), (extra, usual) = (_own_and_usual_s(part, late.rank, ranks) for part in (common, own))
    more, more_s = _more_of_the_same(common, peer, late.rank, ranks)
    return Compared(
        behind=late,
        op=job.op_noun,
        ratio=own_s / peers_s if peers_s else 1.0,
        own=own.filter(rank=late.rank).height,
        own_s=extra,
        more=more,
        more_s=more_s,
        uneven=extra - usual + more_s > own_s - peers_s - more_s,
    )


def _own_and_usual_s(ops: pl.DataFrame, rank: int, ranks: int) -> tuple[float, float]:
    """Return what a rank spent on these ops, and its peers in the mean, seconds."""
    itself = pl.col("rank") == rank
    own_s, peers_s = (float(ops.filter(mask)["duration"].sum()) for mask in (itself, ~itself))
    return own_s, peers_s / max(ranks - 1, 1)


def _more_of_the_same(ops: pl.DataFrame, peer: str, rank: int, ranks: int) -> tuple[float, float]:
    """Return how many more ops a rank has than its peers in the mean, of those that share a `peer`, and how long so
    many more take on the peers, seconds.
    """
    itself = pl.col("rank") == rank
    of_peer = ops.group_by(peer).agg(
        more=itself.sum() - (~itself).sum() / max(ranks - 1, 1), usual_s=pl.col("duration").filter(~itself).mean()
    )
    return float(of_peer["more"].sum()), float((of_peer["more"] * of_peer["usual_s"]).sum())


def _longest_part(late: RankBehind) -> str:
    """Return the phase and the operator in which the rank's host takes longest beyond its peers, in words."""
    ops = late.job.ops
    if not {"operator", "phase"} <= set(ops.columns):
        return ""
    named = [name for name in ("outer", "operator", "phase") if name in ops.columns]
    host = ops.select("rank", "duration", *named).filter(late.behind.ops)
    operator = pl.col("outer" if "outer" in host.columns else "operator").fill_null("Python, outside operators")
    key = [pl.col("phase").fill_null("?"), operator.alias("operator")]
    is_late, others = pl.col("rank") == late.rank, max(host["rank"].n_unique() - 1, 1)
    excess = (
        host.with_columns(key)
        .group_by("phase", "operator")
        .agg(more=pl.col("duration").filter(is_late).sum() - pl.col("duration").filter(~is_late).sum() / others)
        .sort("more", "phase", "operator", descending=[True, False, False])
    )
    first = excess.row(0, named=True)
    return f"; most of it in {first['phase']}: {first['operator']} (+{seconds(first['more'] / len(late.job.steps))})"


#: Of kinds of findings on a rank that is behind in one part of its time: the part, and what the rank does.
_PARTS: Mapping[str, tuple[Part, Callable[[RankBehind], str]]] = {
    "slow-nic": (
        Part.TRANSFERS,
        lambda _: "its transfers take longer than those of its peers once all ranks are there",
    ),
    "late-data-loading": (
        Part.INPUT,
        lambda late: f"waits {late.spent} for its data loader, its peers {late.usual}",
    ),
    "slow-host-code": (
        Part.HOST,
        lambda late: f"its host works {late.spent} between calls, {late.usual} on its peers{_longest_part(late)}",
    ),
    "python-gc": (
        Part.GC,
        lambda late: f"Python collects garbage for {late.spent}, on its peers for {late.usual}",
    ),
}


def behind_in_a_part(kind: str, job: GraphSubject) -> Iterator[Candidate]:
    """Yield the rank that the others wait for, if it is behind in the part of its time that this kind is about."""
    part, effect = _PARTS[kind]
    late = rank_behind(job, part)
    if late is not None:
        yield late.candidate(kind, effect(late))


def slower_computes(kind: str, job: GraphSubject) -> Iterator[Candidate]:
    """Yield the rank that takes longer than its peers at the computes that all of them have."""
    computes = compared(job)
    if computes is not None and not computes.uneven:
        effect = f"its {computes.op}s take {computes.ratio:.2f} times as long as the same ones of its peers"
        figure = Figure("time over that of its peers", computes.ratio, 0.0, Unit.FACTOR)
        yield computes.behind.candidate(kind, effect, figure)


def more_computes(kind: str, job: GraphSubject) -> Iterator[Candidate]:
    """Yield the rank that is late because it has computes that not all peers have, or more of those that all have."""
    computes = compared(job)
    if computes is not None and computes.uneven:
        in_steps = f" in {len(job.steps):,} steps" * (len(job.steps) > 1)
        extra = f"{computes.own:,} {computes.op}s{in_steps} ({seconds(computes.own_s)})"
        effect = f"runs {extra} of shapes or counts that not all peers have"
        check = f"which {computes.op}s only this rank runs, and the shapes of their input"
        if computes.more_s > computes.own_s:
            extra = f"{computes.more:,.0f} {computes.op}s more than its peers{in_steps}"
            effect = f"runs {extra} ({seconds(computes.more_s)} of them)"
            check = f"which {computes.op}s this rank runs more often: the number of its microbatches in a step"
        yield replace(
            computes.behind.candidate(kind, effect),
            title="A rank has more work than the others",
            next_check=check,
            suggested_fix="give {ranks} the same work as its peers: microbatches, shapes of its input, layers, experts",
        )
