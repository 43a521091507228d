"""Host code of a worker that takes longer than that of its peers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair, only_in
from tracekit.analysis.detectors.rank_behind import RankBehind, rank_behind
from tracekit.analysis.evidence.host_code import host_code_of
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.scheduler import process_stops_s
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.fixes.plan import SPEED_OF_PEERS
from tracekit.analysis.gpu.part import Part
from tracekit.analysis.numeric.arrays import Bools
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Unit, confidence_from
from tracekit.trace.facts import Fact

#: Name the host code of a worker if it exceeds that of its peers by at least this share of the step.
SMALLEST_HOST_SHARE = 0.02
#: If at least this share of it is in one place of the step, all of it counts as being there. No experiment.
ALL_OF_IT = 0.9
#: Where only collectives were recorded: compute, launches and waits look alike.
_PROFILE_BESIDE_PEER = "profile {ranks} and a peer (torch.profiler, py-spy record): what comes before the collective"


class SlowHostCode(Detector):
    """The training thread of a worker takes longer between its ops than those of its peers.

    Paper: ignores launch delays. tracekit compares what the script does between the ops of a worker (launch delays,
    host work, the time between a forward and its backward) with its peers, beyond their noise and beyond what a worker
    that computes slower takes longer there too, and reports the place in the step.
    """

    kind = "slow-host-code"
    title = "Host code of a worker takes longer than its peers'"
    signature = "one worker is late at the same place of each step, with nothing recorded before that it waited for"
    refuted_by = "a CPU profile of the rank shows the same time at that place as one of its peers"
    next_check = (
        "a CPU profile of the rank's training thread at that place (py-spy record): user code, logging, evaluation,"
        " data preparation; run queue and steal of its cores"
    )
    suggested_fix = (
        "record the training thread of {ranks} (py-spy record), and move what runs only there off that thread:"
        " logging, evaluation, data preparation"
    )
    part = "host"
    repair = Repair("speed-up-host-code", "Make the host code as fast as that of its peers", SPEED_OF_PEERS)

    def find(self, job: Subject) -> Iterator[Candidate]:
        late = rank_behind(job, Part.HOST)
        if late is not None:
            effect = (
                f"its host works {seconds(late.spent_s)} between calls, {seconds(late.usual_s)} on its peers"
                f"{_most_of_it(late)}"
            )
            yield late.candidate(self.kind, effect)
        yield from self._workers(job)

    @only_in(PipelineSubject)
    def _workers(self, job: PipelineSubject) -> Iterator[Candidate]:
        code, slow = host_code_of(job), slow_host_code(job)
        if not slow.any():
            return
        hit = np.asarray(slow.any(axis=1))
        by_place = code.beyond_s(slow).reshape(len(code.places), -1)
        worst = int(by_place.sum(axis=0).argmax())
        longer_s, place = float(by_place[:, worst].sum()), int(by_place[:, worst].argmax())
        most = "" if by_place[place, worst] > ALL_OF_IT * longer_s else "mostly "
        stage, dp_index = divmod(worst, hit.shape[1])
        # Its level, not its scatter: chance has already been ruled out.
        by_step = np.where(slow[stage, :, dp_index], 1 + longer_s / job.unchanged_s, 1.0)
        episodes = code.episodes
        figures = (
            Figure("longer than its peers, over the step", longer_s / job.unchanged_s, SMALLEST_HOST_SHARE, Unit.SHARE),
            Figure(
                "more likely slow than by chance", float(episodes.nats[hit.ravel()].min()), episodes.needed, Unit.NATS
            ),
        )
        effect = f"host code takes {seconds(longer_s)} longer than that of its peers, {most}{code.places[place]}"
        seen = job.shows(Fact.COMPUTE)
        yield Candidate(
            self.kind,
            Place(workers=job.workers_where(hit)),
            effect if seen else f"it comes to the collective {seconds(longer_s)} after its peers",
            figures,
            confidence_from(figures),
            code.as_peers(slow),
            by_step,
            title=None if seen else "Rank is late to collectives",
            suggested_fix=None if seen else _PROFILE_BESIDE_PEER,
        )


def slow_host_code(job: PipelineSubject) -> Bools:
    """Which workers' host code takes longer than their peers', and when, [stages, steps, dp_ranks].

    Stops of a process make it launch late, too: one problem, one cause. Where the kernel counted them, steps with stops
    are left out; otherwise, launch delays are those without the stops seen in computes.
    """
    return np.asarray(host_code_of(job).slow(SMALLEST_HOST_SHARE) & ~(process_stops_s(job) > 0))


def _most_of_it(late: RankBehind) -> str:
    """Return the phase and the operator in which the rank's host takes longest beyond its peers, in words."""
    ops = late.job.ops
    if not {"operator", "phase"} <= set(ops.columns):
        return ""
    named = [name for name in ("outer", "operator", "phase") if name in ops.columns]
    host = ops.select("rank", "duration", *named).filter(late.behind.ops)
    operator = pl.col("outer" if "outer" in host.columns else "operator").fill_null("Python, outside operators")
    key = [pl.col("phase").fill_null("?"), operator.alias("operator")]
    own, others = pl.col("rank") == late.rank, max(host["rank"].n_unique() - 1, 1)
    excess = (
        host.with_columns(key)
        .group_by("phase", "operator")
        .agg(more=pl.col("duration").filter(own).sum() - pl.col("duration").filter(~own).sum() / others)
        .sort("more", "phase", "operator", descending=[True, False, False])
    )
    first = excess.row(0, named=True)
    return f"; most of it in {first['phase']}: {first['operator']} (+{seconds(first['more'])})"
