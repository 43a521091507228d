"""A worker that computes slower than its peers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tracekit.analysis.detectors.detector import (
    MOST_OF_PRICE,
    SMALLEST_COST_SHARE,
    Candidate,
    Detector,
    Repair,
    Treatment,
    only_in,
)
from tracekit.analysis.detectors.process_pauses import ProcessPauses
from tracekit.analysis.detectors.rank_behind import compared
from tracekit.analysis.detectors.remedies import SLOW_KIND, SLOW_RANK, Advice
from tracekit.analysis.detectors.slow_computes import (
    ONE_KIND_CHECK,
    slower,
    time_of,
    worker_figures,
)
from tracekit.analysis.evidence.groups import slow_groups
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import (
    as_fast_as_peers,
    beyond_peers_s,
    slow_kind,
    worker_series,
    workers_as_fast_as_peers,
)
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.fixes.plan import MACHINE, SPEED_OF_PEERS
from tracekit.analysis.whatif.interventions import Intervention
from tracekit.report.finding import Figure, Place, Unit, confidence_from
from tracekit.trace.model import Worker


class BadWorker(Detector):
    """A worker that computes slower than its peers of the same stage, always or at times.

    Paper: finds it by M_W, the share of the loss saved by idealising the slowest 3 % of the workers (by min(S_dp,
    S_pp)). tracekit names the workers themselves, from the median ratio of their forwards, and of their backwards, to
    those of the same stage and microbatch in each step. 4 %: half the effect of an idle neighbour or a warmer rack on a
    GPU, ten times the differences between healthy ones. Chance: a log-likelihood ratio that noise reaches in one
    healthy job of a thousand, for any number of workers and step patterns; the noise is that of the run, with its
    memory from step to step (see `significance`). The price comes from a replay in which the worker runs like its peers
    in the steps in which it is slow. M_W cannot single out one worker of a DP rank that is slow as a whole.
    """

    kind = "bad-worker"
    title = "Worker computes slower than its peers"
    signature = "forwards, backwards or both of one worker take longer, on all microbatches of the steps it is slow in"
    refuted_by = "the factor goes when the worker's sequences or layers change, or moves to another worker of the host"
    next_check = Advice(
        gpu="DCGM on its GPUs: DCGM_FI_DEV_SM_CLOCK, GPU_TEMP, POWER_USAGE, CLOCKS_EVENT_REASONS, XID_ERRORS; host:"
        " PSI, steal, run queue",
        cpu="its cores: clocks (turbostat), other processes (top); host: PSI, steal, run queue",
    )
    suggested_fix = SLOW_RANK
    part = "compute"
    treatment = Treatment.REPLACE_MACHINES
    repair = Repair("replace-workers", "Make the rank as fast as its peers", SPEED_OF_PEERS, excludes=MACHINE)

    def find(self, job: Subject) -> Iterator[Candidate]:
        kernels = compared(job)
        if kernels is not None and not kernels.uneven:
            effect = f"its {kernels.op}s take {kernels.ratio:.2f} times as long as the same ones of its peers"
            figure = Figure("time over that of its peers", kernels.ratio, 0.0, Unit.FACTOR)
            yield kernels.behind.candidate(self.kind, effect, figure)
        yield from self._workers(job)

    @only_in(PipelineSubject)
    def _workers(self, job: PipelineSubject) -> Iterator[Candidate]:
        _, hit = slow_groups(job)
        if not hit.any():
            return
        at_times = np.zeros_like(hit)
        if len(job.dp_ranks) > 1:
            assert job.profile is not None
            at_times = hit & ~job.profile.on.all(axis=1)
        if (hit & ~at_times).any():
            yield self.of_workers(job, job.workers_where(hit & ~at_times))
        for worker in job.workers_where(at_times):
            yield self.of_workers(job, (worker,))

    @classmethod
    def of_workers(cls, job: PipelineSubject, workers: Sequence[Worker]) -> Candidate:
        """The candidate that names `workers`, which are slow in the same steps."""
        hit = job.cells_of(workers)
        figures, one_kind = worker_figures(job, hit), slow_kind(job, hit) is not None
        return Candidate(
            cls.kind,
            Place(workers=tuple(workers)),
            slower(job, hit, "its peers" if len(workers) == 1 else "their peers"),
            figures,
            confidence_from(figures[:2]),
            workers_as_fast_as_peers(job, hit),
            worker_series(job, hit),
            time_of(job, hit),
            next_check=ONE_KIND_CHECK if one_kind else None,
            suggested_fix=SLOW_KIND if one_kind else None,
            excess=figures[0].value,
        )

    def review(self, job: Any, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Leave out workers that are slow because their processes are stopped, and those whose slowness costs nothing
        once all other findings are gone.
        """
        remaining = []
        for candidate in candidates:
            stopped = _stopped(job, candidate, candidates) if candidate.kind == self.kind else set()
            slow = tuple(worker for worker in candidate.where.workers if worker not in stopped)
            if not stopped:
                remaining.append(candidate)
            elif slow:
                remaining.append(self.of_workers(job, slow))
        reviewed = list(remaining)
        for index, candidate in enumerate(remaining):
            if candidate.kind == self.kind and len(candidate.where.workers) > 1:
                others = [other.change for other in remaining if other is not candidate and other.change is not None]
                reviewed[index] = self.of_workers(job, _costly(job, candidate.where.workers, others))
        return reviewed


def _stopped(job: PipelineSubject, slow: Candidate, candidates: Sequence[Candidate]) -> set[Worker]:
    """The slow workers whose processes are stopped for long enough to explain that."""
    stopped: set[Worker] = set()
    for pauses in candidates:
        both = set(pauses.where.workers) & set(slow.where.workers)
        if pauses.kind == ProcessPauses.kind and pauses.change is not None and both:
            change = as_fast_as_peers(job, sorted(both))
            if job.explained(change, pauses.change) >= MOST_OF_PRICE:
                stopped |= both
    return stopped


def _costly(job: PipelineSubject, workers: tuple[Worker, ...], others: Sequence[Intervention]) -> tuple[Worker, ...]:
    """Return the workers that each cost as much as a finding must; all of them, if they do so only together.

    The longer a worker computes beyond its peers, the more it costs, so bisection finds where it begins to matter.
    """

    def step_s(slow: Worker | None) -> float:
        repaired = as_fast_as_peers(job, [worker for worker in workers if worker != slow])
        return float(job.step_times((*others, repaired)).mean())

    ranked = sorted(workers, key=lambda worker: beyond_peers_s(job, worker))
    least_s = step_s(None) + SMALLEST_COST_SHARE * job.unchanged_s
    return tuple(sorted(ranked[bisect_left(ranked, least_s, key=step_s) :])) or workers
