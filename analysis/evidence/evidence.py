"""The evidence that all rules read, computed once per job.

In: a `Trace`, its `JobReplay` and `Attribution`. Out: `Evidence`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import polars as pl
from msgspec import structs

from tracekit.analysis.attribution.attribution import LARGEST_DISCREPANCY, Attribution, Trust
from tracekit.analysis.attribution.chance import Parts, noisy_step_times
from tracekit.analysis.evidence.breaks import Breaks, find_breaks
from tracekit.analysis.evidence.compute_profile import ComputeProfile
from tracekit.analysis.evidence.compute_table import ComputeTable
from tracekit.analysis.evidence.computes import Computes
from tracekit.analysis.evidence.congestion import Congestion, congestion
from tracekit.analysis.evidence.cores import on_shared_cores, queued_s
from tracekit.analysis.evidence.data_waits import DataWaits
from tracekit.analysis.evidence.exchanges import even_share, exchange_evidence
from tracekit.analysis.evidence.host_code import HostCode
from tracekit.analysis.evidence.lockstep import Lockstep
from tracekit.analysis.evidence.naming import Names
from tracekit.analysis.evidence.off_cpu import off_cpu_s, stopped_s, stops_of
from tracekit.analysis.evidence.paused_starts import PausedStarts, find_paused_starts, with_paused_starts
from tracekit.analysis.evidence.pauses import Pauses
from tracekit.analysis.evidence.step_edges import with_overlap, with_step_delays
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.evidence.transfers import Traffic
from tracekit.analysis.graph.op_grid import OpGrid, TransferGrid, op_grid, transfer_grid
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import (
    CostOverlay,
    Intervention,
    NoDelays,
    Scale,
    Together,
    step_times,
)
from tracekit.analysis.whatif.scenario import RECORDED
from tracekit.report.experts import ExpertCause
from tracekit.trace.canonical import RUN_QUEUE, Trace
from tracekit.trace.facts import Fact, Lack
from tracekit.trace.magnitudes import LONGEST_S
from tracekit.trace.model import COMMUNICATION, DP_COLLECTIVES, OpKind, Worker

if TYPE_CHECKING:
    from tracekit.analysis.detectors.detector import Candidate, Detector
    from tracekit.analysis.evidence.ops import OpEvidence
    from tracekit.analysis.experts.loads import Loads
    from tracekit.analysis.fixes.plan import Plan
    from tracekit.report.finding import Finding, Place

#: Findings that cost less than this share of the step, gone alone or with all others gone, are not reported.
SMALLEST_COST_SHARE = 0.02


def _grid(kinds: Collection[OpKind], *, most: int | None = None) -> cached_property[OpGrid]:
    """The ops of these kinds by stage; `most` as in `op_grid`."""
    return cached_property(lambda evidence: op_grid(evidence.replay.graph, kinds, most=most))


class Evidence(Subject, frozen=True, eq=False):
    """The evidence on one job. `replay`: only with the launch delays of each step itself, see `step_edges`.

    `expert_loads`: tokens of each expert, if the job logged them.
    """

    trace: Trace
    replay: JobReplay
    attribution: Attribution
    computes: Computes
    paused_starts: PausedStarts | None = None
    breaks: Breaks | None = None
    expert_loads: Loads | None = None

    #: The data-parallel collectives by stage.
    collectives = _grid(DP_COLLECTIVES)
    #: The exchange of embedding gradients on the first and the last stage.
    embedding_exchanges = _grid((OpKind.EMBEDDING_GRADS_ALL_REDUCE,))
    #: The optimizer of each stage.
    optimizers = _grid((OpKind.OPTIMIZER,))
    #: The forwards of each stage, in row order.
    forwards = _grid((OpKind.FORWARD_COMPUTE,))
    #: The backwards of each stage, in row order.
    backwards = _grid((OpKind.BACKWARD_COMPUTE,))
    #: The first forward of each stage.
    first_forwards = _grid((OpKind.FORWARD_COMPUTE,), most=1)
    #: The first gathering of parameters of each stage; a step with such ops begins with it.
    first_gathers = _grid((OpKind.PARAMS_ALL_GATHER,), most=1)
    #: The data loading of each stage, if it was recorded.
    data_loads = _grid((OpKind.DATA_LOAD,))
    #: Host work between other ops, if it was recorded.
    host_work = _grid((OpKind.HOST_DELAY,))
    #: Garbage collections between computes, if they were recorded.
    collections = _grid((OpKind.GC,))
    #: Checkpoints, if they were recorded.
    checkpoints = _grid((OpKind.CHECKPOINT,))
    #: Evaluations between training steps, if they were recorded.
    evaluations = _grid((OpKind.EVALUATION,))
    #: All ops of a worker.
    all_ops = _grid(tuple(OpKind))
    #: All communication of a worker.
    communicating = _grid(COMMUNICATION)
    #: Every op that is not communication; the host causes their launch delays.
    computing = _grid(frozenset(OpKind) - COMMUNICATION)

    @classmethod
    def of(cls, trace: Trace, replay: JobReplay, attribution: Attribution) -> Evidence:
        """Gather evidence on a job."""
        by_step = with_step_delays(replay, trace.step_starts)
        computes = Computes(
            by_step, Lockstep.of(trace, by_step.graph), queued_s(trace, by_step.graph), on_shared_cores(trace)
        )
        paused = find_paused_starts(by_step, computes.pauses)
        by_step = with_paused_starts(by_step, paused)
        stalled = 0.0 if by_step.stalled_s is None else by_step.stalled_s
        busy_s = step_times(by_step, ()) - stalled  # a stall lies between two steps and belongs to neither
        by_step = with_overlap(by_step, trace.step_starts, busy_s)
        return cls(trace, by_step, attribution, computes, paused, find_breaks(by_step))

    @property
    def dp_ranks(self) -> tuple[int, ...]:
        """The DP ranks on the last axis of the grids."""
        return self.replay.graph.dp_ranks

    @cached_property
    def dp_index(self) -> dict[int, int]:
        """DP rank -> its index on the last axis of the grids."""
        return {dp_rank: at for at, dp_rank in enumerate(self.dp_ranks)}

    @property
    def stages(self) -> int:
        """Pipeline stages of the job."""
        return self.replay.graph.layout.pp

    @property
    def gpus(self) -> int:
        return self.attribution.world_size

    @property
    def steps(self) -> Int32s:
        return self.replay.graph.steps

    @property
    def everywhere(self) -> str:
        return "all ranks" if self.gpus > 1 else "its only rank"

    @cached_property
    def names(self) -> Names:
        layout = self.replay.graph.layout
        alike = layout.tp * layout.cp if self.lockstep is None else 1
        return Names(self.worker_ranks, self.hosts, self.stages, self.host_of_rank, alike)

    @property
    def lacks(self) -> tuple[Lack, ...]:
        return self.trace.source_kind.lacks

    @property
    def daily(self) -> bool:
        """Whether times are shares of a step: not if it is unknown what happens between collectives."""
        return self.shows(Fact.COMPUTE)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.trace.metadata

    @property
    def slowdown(self) -> float:
        return self.attribution.slowdown

    def candidates(self, detector: Detector) -> Iterator[Candidate]:
        """Yield what a detector finds in the job, beyond what uneven experts explain."""
        of_experts = detector.kind in {*get_args(ExpertCause), "unknown-loads"}
        return detector.in_pipeline(self if of_experts else self.beyond_experts or self)

    @cached_property
    def exchanges(self) -> OpEvidence | None:
        """The all-to-alls and the work between them, None if the trace has none."""
        return exchange_evidence(self.trace, self.expert_loads)

    @cached_property
    def even_experts(self) -> Intervention | None:
        """The job without what loads of experts explain, or may explain; None if that is nothing."""
        exchanges = self.exchanges
        if exchanges is None or exchanges.even is exchanges.pace:
            return None
        ranks = {rank: worker.dp_rank for worker, rank in self.worker_ranks.items()}
        changed = even_share(exchanges).filter(pl.col("step").is_in(self.steps.tolist()))
        step = np.searchsorted(self.steps, changed["step"].to_numpy())
        lane = np.array([self.dp_index.get(ranks[rank], -1) for rank in changed["rank"].to_list()], np.int64)
        factors = []
        for kind, grid in ((OpKind.FORWARD_COMPUTE, self.forwards), (OpKind.BACKWARD_COMPUTE, self.backwards)):
            factor = np.ones(grid.shape)
            here = ((changed["compute"] == str(kind)) & (changed["seq"] < grid.shape[1])).to_numpy() & (lane >= 0)
            factor[0, changed["seq"].to_numpy()[here], step[here], lane[here]] = changed["share"].to_numpy()[here]
            factors.append(Scale(grid, factor))
        return Together(tuple(factors))

    @cached_property
    def beyond_experts(self) -> Evidence | None:
        """The evidence on the job of `even_experts`; None if that is the job as it is."""
        if self.even_experts is None:
            return None
        overlay = CostOverlay.recorded(self.replay)
        self.even_experts.make(overlay)
        cost = tuple(changed.matrix() for changed in overlay.cost)
        replay = structs.replace(self.replay, durations=structs.replace(self.replay.durations, cost=cost))
        return structs.replace(self, replay=replay, computes=structs.replace(self.computes, replay=replay))

    def reviewed(self, detector: Detector, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return detector.review(self, candidates)

    @property
    def measured_s(self) -> float:
        return self.attribution.recorded_s

    @property
    def replay_error(self) -> float:
        return self.attribution.trust.replay_error

    @property
    def smallest_cost_s(self) -> float:
        return SMALLEST_COST_SHARE * self.unchanged_s

    def undecided(self) -> str:
        from tracekit.analysis.evidence.workers import undecided  # which reads this evidence

        found = undecided(self)
        if found is None:
            return ""
        return (
            f"worker {found.worker} computes {found.excess:.0%} slower, where noise alone makes {found.noise:.0%}:"
            f" about {found.steps} steps would tell"
        )

    def machines_at_fault(self, where: Place) -> bool:
        from tracekit.analysis.evidence.cards import hardware_at_fault  # which reads this evidence

        return hardware_at_fault(self, where.workers)

    def fixes(self, detector: Detector, found: Finding) -> Iterator[Plan]:
        return detector.fixes_in_pipeline(self, found)

    def seen(self, found: Finding) -> str:
        """Return the coordinates of a finding, and when it acts, in words that follow its place."""
        workers = found.where.workers
        return f"{f' ({workers[0].coordinates})' if len(workers) == 1 else ''}, {found.when}"

    def fit(self, trust: Trust) -> str:
        if not trust.trustworthy:
            return "; ".join(trust.reasons)
        explained = f"gaps between ops add {trust.discrepancy:.1%}"
        if trust.discrepancy > LARGEST_DISCREPANCY:
            explained += f", all but {trust.unexplained:.1%} explained"
        layout = self.replay.graph.layout
        ranks, inside = layout.tp * layout.cp, ""
        if ranks > 1 and self.lockstep is None:
            inside = f"; one rank in {ranks} recorded, standing for its worker"
        return f"replay within {trust.replay_error:.1%} of the recording; {explained}{inside}"

    def places(self, where: Place) -> Iterator[tuple[int | None, Worker | None]]:
        for worker in self._workers_at(where):
            yield self.worker_ranks.get(worker), worker
        lockstep = self.lockstep
        if where.ranks and lockstep is not None:
            worker_of = {
                rank: worker
                for worker, ranks in zip(lockstep.workers, lockstep.ranks, strict=True)
                for rank in ranks or ()
            }
            yield from ((rank, worker_of[rank]) for rank in where.ranks)

    def has(self, where: Place) -> bool:
        workers = [*self._workers_at(where), *(Worker(self.dp_ranks[0], stage) for stage in where.pp_ranks)]
        return (
            all(worker.dp_rank in self.dp_index and 0 <= worker.pp_rank < self.stages for worker in workers)
            and all(0 <= rank < self.gpus for rank in where.ranks)
            and where.host in {None, *self.host_of_rank.values()}
        )

    def _workers_at(self, where: Place) -> Iterator[Worker]:
        """Yield the workers of a place; none for the whole job."""
        yield from where.workers
        for link in where.links:
            yield from link.ends
        for dp_rank in where.dp_ranks:
            yield from (Worker(dp_rank, stage) for stage in range(self.stages))

    def step_times(self, changes: Sequence[Intervention]) -> Floats:
        return step_times(self.replay, changes)

    @cached_property
    def noise(self) -> Parts:
        return Parts.of(self.attribution.original, self.attribution.ideal, self.noisy)

    @cached_property
    def noisy(self) -> Floats:
        """Step times of the ideal job with the noise of the run, seconds, [steps]."""
        return noisy_step_times(self.replay)

    @cached_property
    def stalled_s(self) -> Floats:
        """Seconds in which no rank does anything, [steps]."""
        none = np.zeros(len(self.replay.graph.steps))
        return none if self.replay.stalled_s is None else self.replay.stalled_s

    @property
    def recorded_s(self) -> float:
        """Mean step including stalls between steps, seconds."""
        return max(self.attribution.recorded_s, self.unchanged_s)

    @property
    def distances_seen(self) -> bool:
        """True if the trace shows how much of the end of a step overlaps the beginning of the next one.

        Starts relative to each step do not, unless workers begin late because they ended the previous step late.
        """
        return bool(self.trace.step_starts) or self.replay.overlap_s is not None

    @cached_property
    def delay_share(self) -> float:
        """The share that a step's own launch delays add to it; below 0 if ops overlap that the graph orders."""
        return self.replay.mean_step_time(RECORDED) / self.attribution.original_s - 1

    def delay_share_without(self, changes: Sequence[Intervention]) -> float:
        """As `delay_share`, without the launch delays that go with `changes`: the part left to explain, at least 0.

        Delays that only show once a change has made room for them cost the recorded step nothing.
        """
        gone_s = max(self._delays_s(()) - self._delays_s(changes), 0.0)
        return max(self.delay_share - gone_s / self.attribution.original_s, 0.0)

    def _delays_s(self, changes: Sequence[Intervention]) -> float:
        """Seconds that the launch delays of compute ops add to the mean step after `changes`."""
        kept = step_times(self.replay, changes)
        return float((kept - step_times(self.replay, (*changes, NoDelays()))).mean())

    @cached_property
    def launch_delays(self) -> tuple[Floats, ...]:
        """Launch delays without the parts due to paused processes and to breaks, seconds, one [rows, lanes] matrix per
        block.
        """
        paused = self.paused_starts
        delays = self.replay.durations.launch_delay if paused is None else paused.delays_left
        return delays if self.breaks is None else self.breaks.without(delays)

    @property
    def table(self) -> ComputeTable:
        """The computes of the job."""
        return self.computes.table

    @property
    def profile(self) -> ComputeProfile | None:
        """The factors of compute costs; None if the job has no forwards or no backwards."""
        return self.computes.profile

    @property
    def pauses(self) -> Pauses | None:
        """Pauses in computes; None if the job has no forwards or no backwards."""
        return self.computes.pauses

    @property
    def lockstep(self) -> Lockstep | None:
        """The ranks inside workers; None if the trace lacks their waits for each other."""
        return self.computes.lockstep

    @cached_property
    def transfers(self) -> TransferGrid:
        """The transfers between stages."""
        return transfer_grid(self.replay.graph)

    @cached_property
    def traffic(self) -> Traffic:
        """Links, cards and collectives of the network."""
        return Traffic.of(self)

    @cached_property
    def congestion(self) -> Congestion:
        """Transfers and collectives that take longer at some times than at others."""
        return congestion(self.traffic)

    @cached_property
    def data_waits(self) -> DataWaits:
        """Waits for data at the beginning of a step."""
        return DataWaits.of(self)

    @cached_property
    def host_code(self) -> HostCode:
        """Work of the training threads between ops."""
        return HostCode.of(self)

    @cached_property
    def all_workers_traced(self) -> bool:
        """True if every worker of the layout has ops in the trace."""
        if self.all_lanes_replayed:
            return True
        coverage = self.trace.coverage()
        return coverage.workers_traced == coverage.workers_expected

    @property
    def all_lanes_replayed(self) -> bool:
        """True if every DP rank of the layout is replayed in every step, so that nothing is missing."""
        graph = self.replay.graph
        lanes = sum(block.lanes for block in graph.blocks)
        return not graph.dropped_lanes and lanes == len(graph.steps) * graph.layout.dp_ranks

    @cached_property
    def worker_ranks(self) -> dict[Worker, int]:
        """The recorded rank of each traced worker."""
        return self.trace.worker_ranks()

    @cached_property
    def host_of_rank(self) -> dict[int, str]:
        """The host of each rank, as far as the metadata gives it."""
        return self.trace.hosts

    @cached_property
    def hosts(self) -> dict[Worker, str]:
        """The host of each traced worker, as far as the metadata gives it."""
        hosts = self.host_of_rank
        return {worker: hosts[rank] for worker, rank in self.worker_ranks.items() if rank in hosts}

    @cached_property
    def pauses_inside_computes(self) -> int | None:
        """The number of garbage collections seen inside computes; None if they were not recorded."""
        collected = self.trace.metadata.get("collect")
        nested = collected.get("nested") if isinstance(collected, dict) else None
        count = nested.get(str(OpKind.GC), 0) if isinstance(nested, dict) else None
        return count if isinstance(count, int) and 0 <= count < 2**53 else None

    @cached_property
    def off_cpu_s(self) -> Floats:
        """Seconds in which each worker neither ran nor was ready to run in its own ops, [stages, steps, dp_ranks].

        0 for workers of several ranks (see `Lockstep.off_s`).
        """
        off_s = off_cpu_s(self.trace, self.replay.graph)
        return off_s[..., 0] if off_s.shape[3] == 1 else np.zeros(off_s.shape[:3])

    @cached_property
    def stopped_s(self) -> Floats:
        """Seconds by which stops of its process prolong the computes of each worker, [stages, steps, dp_ranks]."""
        return stopped_s(self.off_cpu_s, self.table)

    @cached_property
    def process_stops_s(self) -> Floats:
        """Time in which the process of each worker is stopped, if it is stopped repeatedly, as the kernel counted it,
        seconds, [stages, steps, dp_ranks].
        """
        if self.table.empty:
            return np.zeros_like(self.off_cpu_s)
        by_kind_s: Floats = np.nansum(self.table.grid, axis=(2, 3)).transpose(0, 1, 3, 2)
        members = self.off_cpu_s.transpose(0, 2, 1)
        off_s, stops_s = (each.reshape(-1, each.shape[2]) for each in (members, self.stopped_s.transpose(0, 2, 1)))
        by_kind_s = by_kind_s.reshape(len(by_kind_s), *off_s.shape)
        return stops_of(off_s, stops_s, by_kind_s, self.unchanged_s).reshape(members.shape).transpose(0, 2, 1)

    @cached_property
    def stopped_processes(self) -> Bools:
        """Workers whose process is stopped in several steps, as the kernel counted it, [stages, dp_ranks]."""
        return np.asarray((self.process_stops_s > 0).any(axis=1))

    @cached_property
    def steps_with_stops(self) -> Bools:
        """Steps with stops of the processes that count as stopped, [steps]."""
        steps = np.asarray((self.process_stops_s > 0).any(axis=(0, 2)))
        if self.lockstep is not None:
            steps = steps | self.lockstep.stopped(self.unchanged_s)[0].any(axis=(0, 1))
        return steps

    @cached_property
    def run_queue_s(self) -> Floats:
        """Seconds per mean step that each worker's training thread waited in the run queue, [stages, dp_ranks].

        0 if the metadata does not give it.
        """
        stated, waits = self.trace.metadata.get(RUN_QUEUE), np.zeros((self.stages, len(self.dp_ranks)))
        known = stated if isinstance(stated, dict) else {}
        for worker, rank in self.worker_ranks.items():
            seconds = known.get(str(rank))
            if isinstance(seconds, int | float) and 0 <= seconds < LONGEST_S and worker.dp_rank in self.dp_index:
                waits[worker.pp_rank, self.dp_index[worker.dp_rank]] = seconds
        return waits

    def worker(self, stage: int, dp_index: int) -> Worker:
        """The worker at an index of the grids."""
        return Worker(self.dp_ranks[int(dp_index)], int(stage))

    def workers_where(self, hit: np.ndarray) -> tuple[Worker, ...]:
        """The workers where `hit` [stages, dp_ranks] is True, by DP rank, then stage."""
        return tuple(sorted(self.worker(stage, dp_index) for stage, dp_index in zip(*np.nonzero(hit), strict=True)))

    def cells_of(self, workers: Iterable[Worker]) -> np.ndarray:
        """True at the cells of these workers, [stages, dp_ranks]."""
        hit = np.zeros((self.stages, len(self.dp_ranks)), np.bool_)
        for worker in workers:
            hit[worker.pp_rank, self.dp_index[worker.dp_rank]] = True
        return hit
