"""A pipeline under diagnosis.

In: a `Trace` and its `JobReplay`. Out: `PipelineSubject`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.attribution.chance import Parts, noisy_step_times
from tracekit.analysis.evidence.compute_profile import ComputeProfile
from tracekit.analysis.evidence.compute_table import ComputeTable
from tracekit.analysis.evidence.computes import Computes
from tracekit.analysis.evidence.cores import on_shared_cores, queued_s
from tracekit.analysis.evidence.lockstep import Lockstep
from tracekit.analysis.evidence.naming import Names
from tracekit.analysis.evidence.paused_starts import PausedStarts, find_paused_starts, with_paused_starts
from tracekit.analysis.evidence.pauses import Pauses
from tracekit.analysis.evidence.step_edges import Breaks, find_breaks, with_overlap, with_step_delays
from tracekit.analysis.evidence.subject import JobKind, Subject
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import (
    Intervention,
    step_times,
)
from tracekit.trace.canonical import Trace
from tracekit.trace.facts import Fact, Lack
from tracekit.trace.model import Worker

if TYPE_CHECKING:
    from tracekit.analysis.experts.loads import Loads
    from tracekit.report.finding import Place


class PipelineSubject(Subject, frozen=True, eq=False):
    """A pipeline. `replay`: only with the launch delays of each step itself, see `step_edges`; `plain`: as recorded.

    `attributed`: returns its attribution, which takes long and which a question does not need.
    `expert_loads`: tokens of each expert, if the job logged them.
    """

    trace: Trace
    replay: JobReplay
    plain: JobReplay
    attributed: Callable[[], Attribution]
    computes: Computes
    paused_starts: PausedStarts | None = None
    breaks: Breaks | None = None
    expert_loads: Loads | None = None

    @classmethod
    def of(
        cls, trace: Trace, replay: JobReplay, attributed: Callable[[], Attribution] | None = None
    ) -> PipelineSubject:
        """Take the job apart into delays of its steps, pauses and breaks.

        `attributed`: returns its attribution; by default, it is computed if needed.
        """
        by_step = with_step_delays(replay, trace.step_starts)
        computes = Computes(
            by_step, Lockstep.of(trace, by_step.graph), queued_s(trace, by_step.graph), on_shared_cores(trace)
        )
        paused = find_paused_starts(by_step, computes.pauses)
        by_step = with_paused_starts(by_step, paused)
        stalled = 0.0 if by_step.stalled_s is None else by_step.stalled_s
        busy_s = step_times(by_step, ()) - stalled  # a stall lies between two steps and belongs to neither
        by_step = with_overlap(by_step, trace.step_starts, busy_s)
        attributed = attributed or partial(attribute, replay)
        return cls(trace, by_step, replay, attributed, computes, paused, find_breaks(by_step))

    @cached_property
    def attribution(self) -> Attribution:
        """What stragglers cost, and which ones."""
        return self.attributed()

    @property
    def kind(self) -> JobKind:
        return JobKind.PIPELINE

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

    @cached_property
    def all_lanes_replayed(self) -> bool:
        """Whether every DP rank of the layout is replayed in every step, so that nothing is missing."""
        graph = self.replay.graph
        lanes = sum(block.lanes for block in graph.blocks)
        return not graph.dropped_lanes and lanes == len(graph.steps) * graph.layout.dp_ranks

    @cached_property
    def all_workers_traced(self) -> bool:
        """Whether every worker of the layout has ops in the trace."""
        if self.all_lanes_replayed:
            return True
        coverage = self.trace.coverage()
        return coverage.workers_traced == coverage.workers_expected

    @property
    def gpus(self) -> int:
        return self.replay.graph.layout.world_size

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

    @property
    def measured_s(self) -> float:
        return self.plain.fit.recorded_s

    @property
    def replay_error(self) -> float:
        return self.plain.fit.error

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
        """See `Subject.step_times`; the same changes are replayed once."""
        key = tuple(map(id, changes))
        if key not in self._replayed:
            times = step_times(self.replay, changes)
            times.flags.writeable = False
            self._replayed[key] = tuple(changes), times  # while a change is referenced, no other has its id
        return self._replayed[key][1]

    @cached_property
    def _replayed(self) -> dict[tuple[int, ...], tuple[tuple[Intervention, ...], Floats]]:
        return {}

    @cached_property
    def noise(self) -> Parts:
        return Parts.of(self.attribution.original, self.attribution.ideal, self.noisy)

    @cached_property
    def noisy(self) -> Floats:
        """Step times of the ideal job with the noise of the run, seconds, [steps]."""
        return noisy_step_times(self.replay)

    @property
    def recorded_s(self) -> float:
        """Mean step including stalls between steps, seconds."""
        return max(self.measured_s, self.unchanged_s)

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
