"""Rules for causes that sit in the computes: workers, hosts, groups of ranks, data, stages, steps.

In: `Evidence`. Out: `Candidate`s. See `rule`. What varies for no lasting reason is in `rules_variation`.

The thresholds named "paper" are those of "Understanding Stragglers in Large Model Training" (OSDI'25).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tracekit.analysis.attribution.patterns import TimePattern, TimeShape
from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Unit, Where, confidence_from
from tracekit.analysis.causes.remedies import SLOW_KIND, SLOW_RANK, THROTTLED_HOST, THROTTLED_RANK
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import Scale
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD, SMALLEST_FACTOR, ComputeProfile
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.groups import SlowGroup, slow_groups
from tracekit.analysis.evidence.significance import Bools, Episodes
from tracekit.analysis.evidence.workers import (
    SMALLEST_STAGE_EXCESS,
    data_factor,
    optimizer_factor,
    ranks_with_more_data,
    slow_factor,
    slow_machines,
    slow_workers,
    stage_excess,
    worker_factor,
    worker_series,
    workers_as_fast_as_peers,
)
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import lower_median, safe
from tracekit.model import Worker

#: Fewer steps than that leave it open which of them are the usual ones.
FEWEST_STEPS = 3
NOISE = "what noise alone does to it"
#: A worker whose backwards are slow by less than this share of what its forwards are is slow in forwards alone.
OTHER_KIND_SHARE = 0.25
ONE_KIND_CHECK = (
    "a profile of that part on this rank and on a peer (py-spy record, torch.profiler): hooks and user code in it, its"
    " input; a machine that is slow is so in forwards and backwards; then DCGM on its GPUs"
)


def _slower(evidence: Evidence, hit: Bools, who: str) -> str:
    """By how much the workers in `hit` compute slower than `who`, beside what noise does, in words."""
    alone = _slow_kind(evidence, hit)
    factors = worker_factor(evidence)[hit] - 1 if alone is None else _kind_factors(evidence, hit)[alone] - 1
    low, high = float(factors.min()), float(factors.max())
    size = f"{high:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    if alone is not None:
        slow, well = ("forwards", "backwards") if alone == FORWARD else ("backwards", "forwards")
        whose = "its" if len(factors) == 1 else "their"
        words = f"{whose} {slow} take {size} longer than those of {who}, {whose} {well} do not"
    else:
        words = f"computes {size} slower than {who}" if len(factors) == 1 else f"compute {size} slower than {who}"
    noise = next((figure.value for figure in _confidence_figures(evidence, hit) if figure.name == NOISE), None)
    throttled = _throttled(evidence, hit)
    return (
        words
        + ("" if noise is None else f"; noise alone makes {noise:.1%}")
        + (f"; its GPU was throttled in {throttled:.0%} of its samples" if throttled else "")
    )


def _slow_kind(evidence: Evidence, hit: Bools) -> int | None:
    """`FORWARD` or `BACKWARD` where the workers in `hit` are slow in that alone; None where they are in both."""
    if len(evidence.dp_ranks) < 2 or not hit.any():
        return None
    beyond = _kind_factors(evidence, hit) - 1
    for kind, other in ((FORWARD, BACKWARD), (BACKWARD, FORWARD)):
        if (beyond[other] < OTHER_KIND_SHARE * beyond[kind]).all():
            return kind
    return None


def _kind_factors(evidence: Evidence, hit: Bools) -> Floats:
    """How slow the forwards and the backwards of the workers in `hit` are beside their peers', [kinds, workers].

    Over the steps in which they are slow.
    """
    factor = slow_factor(evidence).transpose(0, 1, 3, 2)[:, hit]  # [kinds, workers, steps]
    slow = (factor > 1).any(axis=0)
    return np.asarray(1 + ((factor - 1) * slow).sum(axis=2) / np.maximum(slow.sum(axis=1), 1))


def _throttled(evidence: Evidence, hit: Bools) -> float | None:
    """In which share of its samples the GPU of the worst worker in `hit` was throttled; None where nobody looked."""
    shares = [evidence.throttled[worker] for worker in evidence.workers_where(hit) if worker in evidence.throttled]
    return max(shares, default=None)


def _worker_figures(evidence: Evidence, hit: Bools) -> tuple[Figure, ...]:
    factor = float(worker_factor(evidence)[hit].min()) - 1
    exact = evidence.attribution.worker_slowdown.T[hit]
    throttled = _throttled(evidence, hit)
    return (
        Figure("compute beyond that of its peers", factor, SMALLEST_FACTOR, Unit.SHARE),
        *_confidence_figures(evidence, hit),
        Figure("slowdown from it alone", float(exact.max()), 0.0),
        Figure("loss gone if the slowest 3% of workers were ideal", evidence.attribution.m_w.removal, 0.0, Unit.SHARE),
        *([] if throttled is None else [Figure("share of samples with its GPU throttled", throttled, 0.0, Unit.SHARE)]),
    )


def _confidence_figures(evidence: Evidence, hit: Bools) -> tuple[Figure, ...]:
    """What chance would have to explain, and how far the noise of the run itself goes."""
    profile = evidence.profile
    assert profile is not None
    if len(evidence.dp_ranks) < 2:
        return ()
    own = profile.slow_workers & hit
    if own.any():
        return _chance(profile.workers, own)
    return _chance(profile.ranks, slow_machines(evidence) & hit.any(axis=0))


def _chance(episodes: Episodes, hit: Bools) -> tuple[Figure, ...]:
    members = np.flatnonzero(hit.ravel())
    return (
        Figure("more likely slow than by chance", float(episodes.nats[members].min()), episodes.needed, Unit.NATS),
        Figure(NOISE, float(np.expm1(episodes.error[members].max())), 0.0, Unit.SHARE),
    )


def _when(evidence: Evidence, episodes: Episodes, member: int, series: Floats) -> TimePattern:
    """When a member is slow, in the words of a time pattern."""
    steps = evidence.replay.graph.steps
    on, since, period = episodes.on[member], int(episodes.since[member]), int(episodes.period[member])
    shape, slow = TimeShape.PERSISTENT, tuple(int(step) for step in steps[on])
    if on.all():
        slow = ()
    elif period:
        shape = TimeShape.PERIODIC
    elif since:
        shape, slow = TimeShape.CHANGED, ()
    else:
        shape = TimeShape.TRANSIENT
    return TimePattern(
        shape=shape,
        statistic=float(episodes.nats[member]),
        needed=episodes.needed,
        since_step=int(steps[since]) if shape is TimeShape.CHANGED else None,
        period=period or None,
        slow_steps=slow,
        per_step=tuple(float(value) for value in series),
    )


def _time_of(evidence: Evidence, hit: Bools) -> TimePattern | None:
    """When the workers in `hit` are slow; all of them are slow in the same steps."""
    profile = evidence.profile
    assert profile is not None
    if len(evidence.dp_ranks) < 2:
        return None
    series = worker_series(evidence, hit)
    own = profile.slow_workers & hit
    if own.any():
        return _when(evidence, profile.workers, int(np.flatnonzero(own.ravel())[0]), series)
    return _when(evidence, profile.ranks, int(np.flatnonzero(hit.any(axis=0))[0]), series)


class BadWorker(Rule):
    """A worker that computes slower than its peers of the same stage, always or at times.

    Paper: found by M_W, the share of the loss that idealising the slowest 3 % of the workers (by min(S_dp, S_pp))
    gives back. tracekit names the workers themselves, from the median ratio of their forwards, and of their backwards,
    to those of the same stage and microbatch in each step. 4 %: half of what an idle neighbour or a warmer rack does to
    a GPU, ten times what healthy ones differ by. Chance: a log-likelihood ratio that noise reaches in one healthy job
    of a thousand, whatever number of workers and of step patterns was looked at; the noise is the run's own, with its
    memory from step to step (see `significance`). The price comes from a replay in which the worker runs like its
    peers in the steps in which it is slow. M_W is shown beside it: it cannot tell one worker of a DP rank that is slow
    as a whole.
    """

    kind = CauseKind.BAD_WORKER
    title = "Worker computes slower than its peers"
    signature = "forwards, backwards or both of one worker take longer, on all microbatches of the steps it is slow in"
    refuted_by = "the factor goes when the worker's sequences or layers change, or moves to another worker of the host"
    next_check = (
        "DCGM on its GPUs: DCGM_FI_DEV_SM_CLOCK, GPU_TEMP, POWER_USAGE, CLOCKS_EVENT_REASONS, XID_ERRORS; host: PSI,"
        " steal, run queue"
    )
    suggested_fix = SLOW_RANK

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        _, hit = slow_groups(evidence)
        if not hit.any():
            return
        at_times = np.zeros_like(hit)
        if len(evidence.dp_ranks) > 1:
            assert evidence.profile is not None
            at_times = hit & ~evidence.profile.on.all(axis=1)
        if (hit & ~at_times).any():
            yield self.of_workers(evidence, evidence.workers_where(hit & ~at_times))
        for worker in evidence.workers_where(at_times):
            yield self.of_workers(evidence, (worker,))

    @classmethod
    def of_workers(cls, evidence: Evidence, workers: Sequence[Worker]) -> Candidate:
        """The candidate that names `workers`, which are slow in the same steps."""
        hit = evidence.cells_of(workers)
        figures, one_kind = _worker_figures(evidence, hit), _slow_kind(evidence, hit) is not None
        remedy = SLOW_KIND if one_kind else None
        return Candidate(
            cls.kind,
            Where(workers=tuple(workers)),
            _slower(evidence, hit, "its peers" if len(workers) == 1 else "their peers"),
            figures,
            confidence_from(figures[:2]),
            workers_as_fast_as_peers(evidence, hit),
            worker_series(evidence, hit),
            _time_of(evidence, hit),
            next_check=ONE_KIND_CHECK if one_kind else None,
            suggested_fix=THROTTLED_RANK if evidence.hardware_at_fault(workers) else remedy,
        )


class SlowHost(Rule):
    """All (or most) workers of one host compute slower than their peers.

    Paper: M_W counts workers, whatever their host; no signature. tracekit groups slow workers by the host their rank
    runs on, because the check and the repair differ; it needs two traced workers on the host, 70 % of them slow: of
    eight, one may be too little busy to show it.
    """

    kind = CauseKind.SLOW_HOST
    title = "All workers of one host compute slower"
    signature = "most workers of one host, and of no other, share a factor in forwards and backwards"
    refuted_by = "workers of other hosts share the factor, or the host's workers are all of one pipeline stage"
    next_check = (
        "host: PSI (cpu, memory, io), steal, run queue, page cache, CPU frequency governor; power and inlet temperature"
        " of the chassis; DCGM_FI_DEV_POWER_USAGE of all its GPUs"
    )
    suggested_fix = (
        "see what holds {hosts} back: clocks and power (nvidia-smi -q -d PERFORMANCE), busy cores (/proc/pressure/cpu),"
        " other jobs; if there is nothing that you can stop, drain {hosts}"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        for group in slow_groups(evidence)[0]:
            if group.host is not None:
                where = Where(workers=evidence.workers_where(group.hit), host=group.host)
                yield _of_group(self.kind, evidence, group, where, "their peers on other hosts")


class SlowRankGroup(Rule):
    """Several DP ranks compute slower than the others by one factor: older GPUs, a lower power cap, a warmer rack.

    Paper: no signature. tracekit groups slow DP ranks that follow one another, are slow on all stages, in the same
    steps, by factors that differ by less than a quarter of what they are slow by, and make up a quarter of the DP ranks
    (with a pipeline: or whose optimizers are slow, too). Independent faults agree in neither factor nor time.
    """

    kind = CauseKind.SLOW_RANK_GROUP
    title = "A group of DP ranks computes slower than the others"
    signature = "forwards and backwards of several DP ranks take longer by one factor, on all stages, in the same steps"
    refuted_by = "the factors differ within the group, or follow the tokens of its microbatches"
    next_check = "what the group has in common: GPU model, power cap, driver, rack, inlet temperature"
    suggested_fix = (
        "compare GPU model, power cap and driver of {ranks} with the others (nvidia-smi -q): make them alike, or give"
        " {it} fewer microbatches"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        for group in slow_groups(evidence)[0]:
            if group.dp_ranks:
                yield _of_group(self.kind, evidence, group, Where(dp_ranks=group.dp_ranks), "the other DP ranks")


def _of_group(kind: CauseKind, evidence: Evidence, group: SlowGroup, where: Where, who: str) -> Candidate:
    figures = _worker_figures(evidence, group.hit)
    drained = group.host is not None and evidence.hardware_at_fault(evidence.workers_where(group.hit))
    return Candidate(
        kind,
        where,
        _slower(evidence, group.hit, who),
        figures,
        confidence_from(figures[:2]),
        workers_as_fast_as_peers(evidence, group.hit),
        worker_series(evidence, group.hit),
        _time_of(evidence, group.hit),
        suggested_fix=THROTTLED_HOST if drained else None,
    )


class DataSkew(Rule):
    """A DP rank has more data than the others: its ops take longer on all stages, in proportion.

    Paper: no signature; sequence lengths are found by the correlation of forwards and backwards, which a slow worker
    raises as well. tracekit fits what the stages of a DP rank share apart from what a worker adds, so that a bad worker
    beside the skew is still named. Machines that are slow as a whole give themselves away by their optimizer, which
    knows no tokens. It needs a pipeline: of one stage, data and machine cannot be told apart.
    """

    kind = CauseKind.DATA_SKEW
    title = "A DP rank gets more data than the others"
    signature = (
        "forwards and backwards of one DP rank take longer by one factor on all its stages; its optimizer does not"
    )
    refuted_by = "its microbatches have as many tokens, and as long sequences, as those of other DP ranks"
    next_check = "tokens and sum of squared sequence lengths per DP rank and step; the sampler's shards"
    suggested_fix = "have the sampler deal microbatches over DP ranks by cost, not by count"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        hit = ranks_with_more_data(evidence)
        profile = evidence.profile
        if profile is None or not hit.any():
            return
        members = np.flatnonzero(hit)
        excess, optimizer = float(np.expm1(profile.ranks.level[members].min())), _optimizer_excess(evidence, hit)
        figures = (
            Figure("compute beyond that of other DP ranks, on all stages", excess, SMALLEST_FACTOR, Unit.SHARE),
            *_chance(profile.ranks, hit),
            Figure("optimizer beyond that of other DP ranks", optimizer, 0.0, Unit.SHARE),
        )
        share = np.where(hit, data_factor(evidence), 1.0)
        even = share.mean(axis=1, keepdims=True) / share  # the data stays in the job
        change = Scale(evidence.table, even[None, None, None, None])
        series = profile.rank_by_step[:, members].mean(axis=1)
        yield Candidate(
            self.kind,
            Where(dp_ranks=tuple(evidence.dp_ranks[int(at)] for at in members)),
            f"{'takes' if len(members) == 1 else 'take'} at least {excess:.0%} longer than other DP ranks, on all"
            f" {evidence.stages} stages; the optimizers take {optimizer:.0%} longer, so it is not the machines",
            figures,
            confidence_from(figures[:2]),
            change,
            series,
            _when(evidence, profile.ranks, int(members[0]), series),
        )


def _optimizer_excess(evidence: Evidence, hit: Bools) -> float:
    return float(np.median(optimizer_factor(evidence)[:, :, hit])) - 1


class StageImbalance(Rule):
    """A stage (most often the last, with the loss layer) has more work than the others.

    Paper: M_S, the share of the loss that idealising the last stage gives back; above 0.5 the last stage explains
    most of it. tracekit does not clamp M_S (idealising also lengthens the faster stages, so it can exceed 1), looks
    at every stage, not only the last, and compares medians over DP ranks, so that one slow worker moves no stage.
    Where microbatches differ, what a stage does for all alike (a loss per token) and what follows its layers are
    fitted apart, and the price is that of a stage that follows its microbatches as the usual one does. 6 %: uneven
    layers of a model of 16 to a stage.
    """

    kind = CauseKind.STAGE_IMBALANCE
    title = "Stage has more work than the others"
    signature = "forwards and backwards of one stage take longer on all DP ranks"
    refuted_by = "the stage's DP ranks differ (then it is a worker), or all of them sit on one host"
    next_check = "layers per stage, vocabulary size and loss on the last stage, embedding on the first"
    suggested_fix = "give {place} fewer layers"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = evidence.profile
        if profile is None or evidence.stages < 2:
            return
        excess = stage_excess(profile)
        if len(evidence.dp_ranks) == 1:
            excess[slow_workers(evidence)[:, 0]] = 0.0
        for stage in np.flatnonzero((excess > SMALLEST_STAGE_EXCESS).any(axis=1)):
            figures = (
                Figure(
                    "compute beyond that of the usual stage",
                    float(excess[stage].max()),
                    SMALLEST_STAGE_EXCESS,
                    Unit.SHARE,
                ),
                Figure("S of the stage", float(evidence.attribution.stage_slowdown[stage]), 0.0),
                Figure("loss gone if the last stage were ideal", evidence.attribution.m_s.removal, 0.0, Unit.SHARE),
            )
            yield Candidate(
                self.kind,
                Where(pp_ranks=(int(stage),)),
                f"takes {excess[stage].max():.0%} longer than the usual stage, on all DP ranks",
                figures,
                confidence_from(figures[:1]),
                Scale(
                    evidence.table, _like_the_usual_stage(profile, int(stage), excess[stage] > SMALLEST_STAGE_EXCESS)
                ),
            )


def _like_the_usual_stage(profile: ComputeProfile, stage: int, chunks: Bools) -> Floats:
    """What makes some chunks of a stage cost what those of the usual stage do, for each microbatch."""
    usual_s = lower_median(profile.stage_s.ravel(), -1)
    even = (profile.elasticity[:, stage, chunks] == 1).all()
    work = np.ones((1, 1, 1)) if even else np.nan_to_num(profile.workload, nan=1.0)
    elastic, seconds = profile.elasticity[:, stage], profile.base_s[:, stage]
    now_s = seconds[:, :, None, None, None] * (1 + elastic[:, :, None, None, None] * (work - 1))
    # Forwards and backwards share the excess as the usual stage shares its time.
    then_s = (seconds * usual_s / seconds.sum(axis=0))[:, :, None, None, None] * work
    factor = np.ones((len(seconds), len(profile.stage_s), *now_s.shape[1:]))
    factor[:, stage, chunks] = (then_s / safe(now_s))[:, chunks]
    return factor


class SlowSteps(Rule):
    """All workers compute slower in some steps: warm-up, a power cap, another tenant.

    Paper: reports S per step, without a threshold for slow ones. tracekit compares the lower quartile of the computes
    of each step with that of the usual step: 4 %, and a likelihood against chance as for workers, the noise being
    that of the other steps and of the computes within them. Of three steps one may be slow; which of them is the usual
    one rests on two, so that confidence is at most one less the share of slow steps.
    """

    kind = CauseKind.SLOW_STEPS
    title = "All workers compute slower in some steps"
    signature = "in a few steps forwards and backwards of all workers take longer by one factor"
    refuted_by = "only some workers are slow in those steps"
    next_check = "cluster power cap, DCGM_FI_DEV_SM_CLOCK over time, compilation or autotuning in warm-up steps"
    suggested_fix = (
        "compare clocks and power caps of all GPUs in those steps with the others (DCGM_FI_DEV_SM_CLOCK); leave warm-up"
        " and compilation out of the trace"
    )

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        profile = evidence.profile
        if profile is None or len(profile.step) < FEWEST_STEPS:
            return
        slow = profile.slow_step > 1
        if not slow.any() or slow.mean() > 0.5:
            return
        figures = (
            Figure(
                "compute beyond that of the usual step",
                float(profile.step[slow].max()) - 1,
                SMALLEST_FACTOR,
                Unit.SHARE,
            ),
            *_chance(profile.steps, np.array([True])),
        )
        steps = tuple(int(step) for step in evidence.replay.graph.steps[slow])
        change = Scale(evidence.table, 1 / profile.slow_step[:, None])
        confidence = min(confidence_from(figures[:2]), 1 - float(slow.mean()))
        effect = (
            f"computes of {len(steps)} of {len(profile.step)} steps take up to {figures[0].value:.0%} longer than in"
            " the usual step, on all workers"
        )
        yield Candidate(self.kind, Where(steps=steps), effect, figures, confidence, change, profile.step)
