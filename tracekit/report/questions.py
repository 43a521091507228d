"""What other choices would buy: custom questions, schedules and bubbles, overlap and experts, plans.

In: replays, and what `analysis/bubbles/`, `analysis/experts/` and `analysis/plans/` found. Out: plain data for JSON
and all renderers, and tables. docs/plans.md explains the figures; those of bubbles are seconds per lane (one DP rank
in one step, all its stages), means over the lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import polars as pl
from msgspec import Struct

from tracekit.base.limits import Amount, AtMostOne, Count, Finite, Number, Ordinal, Proportion, Seconds
from tracekit.base.text import LONGEST_QUOTE, cut, printable, seconds
from tracekit.report.conclusions import Fix
from tracekit.report.tables import Table, frame_of

if TYPE_CHECKING:
    from tracekit.analysis.attribution.by_label import Share

_FIX_MEANS = "fix: as fast as their peers, everything else as recorded, launch delays kept; as fixes are priced."
_KEEP_MEANS = "keep only: the question of the paper; everything else ideal, without launch delays."
_NO_PEERS = (
    "ideal is the pace of the other steps: no other rank was recorded; --fix 'LABEL=VALUE * 0.5' prices a change"
)
#: The number of values of a label to show, and of characters of each.
_MOST_VALUES, _LONGEST_VALUE = 20, 48

PlaceOfIdle = Literal["warm-up", "between", "drain"]
ReasonOfIdle = Literal["peer", "transfer", "collective", "host"]
CauseOfIdle = Literal["transfers", "jitter", "workers", "stages", "dependency", "host"]

WaitBasis = Literal["peers", "minimum"]
LoadSource = Literal["splits", "loads", "kernel-times"]
#: Pairs of expert and rank.
Placement = list[list[int]]
ExpertCause = Literal["hot-expert", "hot-rank", "rotating", "skew", "late-peer", "one-launch-queue"]


class Question(Struct, frozen=True):
    """One custom what-if question and its answer."""

    question: str  #: the selection or edit, after `fix` or `keep only`
    ops: Count  #: ops selected
    #: mean recorded step with the selected ops as fast as their peers, launch delays kept; of `keep only`, T of the
    #: ideal job with only these ops as recorded
    step_time_s: Seconds
    saved_s: Finite  #: mean recorded step minus that; of `keep only`, T(original) minus that
    error_s: Seconds  #: plus or minus, as of a `Fix`; of `keep only`, without the replay error
    saved_gpu_hours_per_day: Finite | None  #: the same in GPU-hours a day


class ByLabel(Struct, frozen=True):
    """What the ops of each value of a label, or of a combination of labels, cost; costliest first."""

    labels: tuple[str, ...]
    shares: tuple[Share, ...]


def question_table(answered: Sequence[Question], whole: str, *, daily: bool, fix_means: str = _FIX_MEANS) -> Table:
    """The answers to custom questions. `whole`: what times are of, "step" or "recording"; `daily`: with GPU-hours."""
    keeps = [question.question.startswith("keep only ") for question in answered]
    meanings = [*([] if all(keeps) else [fix_means]), *([_KEEP_MEANS] if any(keeps) else [])]
    rows = [
        (
            cut(printable(question.question), LONGEST_QUOTE),
            seconds(question.step_time_s),
            f"{seconds(question.saved_s)} ({question.saved_s / (question.step_time_s + question.saved_s):+z.1%})",
            *([f"{question.saved_gpu_hours_per_day:,.1f}"] if daily else []),
        )
        for question in answered
    ]
    heads = ("What if", f"{whole} time", f"saved per {whole}", *(["GPU-hours a day"] if daily else []))
    return Table("Questions", heads, tuple(rows), " ".join(meanings))


def label_table(group: ByLabel, *, peers: bool = True) -> Table:
    """The cost of each value of a label, costliest first. `peers`: whether there are other ranks to compare with."""
    rows = [
        (
            cut(printable(", ".join(map(str, share.values))), _LONGEST_VALUE),
            f"{share.ops:,}",
            seconds(share.added_s),
            change_text(share.removed_s),
        )
        for share in group.shares[:_MOST_VALUES]
    ]
    names, more = printable(" x ".join(group.labels)), len(group.shares) > _MOST_VALUES
    notes = [
        *([f"the costliest {_MOST_VALUES} of {len(group.shares)}; all with --json or --csv"] if more else []),
        *([] if peers else [_NO_PEERS]),
    ]
    return Table(f"By {names}", (names, "ops", "costs alone", "if average"), tuple(rows), "; ".join(notes) or None)


def change_text(saved_s: float) -> str:
    """The change of a step that saves so much, with its sign."""
    size, sign = seconds(abs(saved_s)), "-" if saved_s > 0 else "+"
    return "0" if float(size.split()[0]) == 0 else f"{sign}{size}"


class Idle(Struct, frozen=True):
    """Idle time of all stages, their mean, at one place for one reason."""

    place: PlaceOfIdle  #: `warm-up`, `between` or `drain`
    reason: ReasonOfIdle  #: `peer`, `transfer`, `collective` or `host`
    idle_s: Seconds  #: seconds


class IdleOfStage(Struct, frozen=True):
    """Idle time of one stage at one place for one reason."""

    place: PlaceOfIdle  #: as in `Idle`
    reason: ReasonOfIdle  #: as in `Idle`
    waits_for: Ordinal | None  #: the stage that it waits for
    idle_s: Seconds  #: seconds


class StageBubbles(Struct, frozen=True):
    """One stage."""

    pp_rank: Ordinal  #: the stage
    work_s: Seconds  #: computing
    idle_s: Seconds  #: the rest of the window
    usable_s: Seconds  #: idle in gaps of more than 50 us
    peak_microbatches: Amount  #: the most microbatches it holds at a time; a chunk counts as its share of the stage
    places: list[IdleOfStage]  #: where, why and for whom


class LostTo(Struct, frozen=True):
    """The part of the idle time that is due to one cause."""

    cause: CauseOfIdle  #: `dependency`, `stages`, `workers`, `jitter`, `transfers` or `host`
    lost_s: Seconds  #: seconds of idle time


class PricedSchedule(Struct, frozen=True):
    """What the pipeline would take under another schedule."""

    schedule: str  #: as asked for
    window_s: Seconds | None  #: the window; null if only bounds are known
    step_time_s: Seconds | None  #: the step
    low_s: Number  #: least window
    high_s: Number  #: greatest window
    saved_s: Number  #: seconds that a step gets shorter
    peak_microbatches: list[Amount] | None  #: the most microbatches that each stage holds
    refused: str | None  #: why there is no price
    assumes: str | None  #: what the price rests on


class LeftOut(Struct, frozen=True):
    """A lane that is not part of the figures."""

    step: Ordinal  #: its step
    dp_rank: Ordinal  #: its DP rank


class Bubbles(Struct, frozen=True):
    """The idle time of the stages of a pipeline.

    All figures are seconds per lane (one DP rank in one step, all its stages), means over the lanes.
    """

    window_s: Seconds | None  #: from the first start to the last end of any compute of a lane
    work_s: Seconds | None  #: of which a stage computes, mean over the stages
    idle_s: Seconds | None  #: the rest
    share: Proportion | None  #: `idle_s` / `window_s`
    places: list[Idle]  #: where and for which reason; sums to `idle_s`
    by_stage: list[StageBubbles]  #: the same by stage
    causes: list[LostTo]  #: why, largest first; sums to `idle_s`
    causes_unknown: str | None  #: why there are no causes
    schedules: list[PricedSchedule]  #: the schedules that were asked for
    unknown: str | None  #: why there are no figures
    left_out: list[LeftOut]  #: lanes that are not part of the figures


def frames(bubbles: Bubbles) -> dict[str, pl.DataFrame]:
    """Where each stage is idle, why, and what schedules would cost; of each schedule the most microbatches held."""
    rows = {stage.pp_rank: frame_of(stage.places, IdleOfStage) for stage in bubbles.by_stage}
    rows = rows or {0: frame_of([], IdleOfStage)}
    peaks = [max(row.peak_microbatches) if row.peak_microbatches else None for row in bubbles.schedules]
    return {
        "bubbles_stages": frame_of(bubbles.by_stage, StageBubbles),
        "bubbles_places": pl.concat(
            frame.select(pl.lit(stage, pl.Int64).alias("pp_rank"), pl.all()) for stage, frame in rows.items()
        ),
        "bubbles_causes": frame_of(bubbles.causes, LostTo),
        "bubbles_schedules": frame_of(bubbles.schedules, PricedSchedule).with_columns(
            peak_microbatches=pl.Series(peaks, dtype=pl.Float64)
        ),
    }


class OverlapOfRank(Struct, frozen=True):
    """One rank, seconds of the recording."""

    rank: Ordinal  #: the rank
    compute_s: Seconds  #: something computes, copies or fills
    communication_s: Seconds  #: something communicates
    both_s: Seconds  #: both at once
    exposed_s: Seconds  #: communication alone
    hidden_share: Proportion  #: `both_s` / `communication_s`
    efficiency: Proportion  #: `both_s` over the shorter of the two
    wait_s: Seconds  #: in collectives, before the transfer
    #: `peers`: until the last member began; `minimum`: beyond the shortest kernel of its name, an upper bound
    wait_basis: WaitBasis
    #: at most so much longer did compute take on the SMs that communication left it; null if the number of SMs is not
    #: known
    sm_tax_at_most_s: Seconds | None


class OverlapOfCollective(Struct, frozen=True):
    """The communication kernels of one name, all ranks together."""

    name: str  #: without return type, template arguments and parameters
    ops: Count  #: how many
    seconds: Seconds  #: of all of them
    exposed_s: Seconds  #: of these without compute
    wait_s: Seconds  #: of these before the transfer


class PhaseOps(Struct, frozen=True):
    """The GPU ops launched inside annotations of one name, such as "attn(F)", all ranks together."""

    phase: str  #: such as `attn(F)`
    ops: Count  #: how many
    seconds: Seconds  #: of all of them


class PhasePair(Struct, frozen=True):
    """How long communication of one phase ran while compute of another did, all ranks together."""

    communication: str  #: phase of the communication
    compute: str  #: phase of the compute
    seconds: Seconds  #: both at once


class Overlap(Struct, frozen=True):
    """Communication and compute at once."""

    ranks: list[OverlapOfRank]  #: the ranks, ascending
    collectives: list[OverlapOfCollective]  #: communication kernels by name, longest first
    phases: list[PhaseOps]  #: GPU ops by annotation, longest first
    pairs: list[PhasePair]  #: what ran under what, longest first
    gpu_ops: Count  #: all GPU ops
    assigned_ops: Count  #: those launched inside an annotation


class LayerLoads(Struct, frozen=True):
    """One layer of experts, mean over the steps."""

    layer: Count  #: from 0, in the order of a forward
    tokens_by_rank: list[Amount]  #: tokens of each rank, ranks ascending
    tokens_by_expert: list[Amount] | None  #: tokens of each expert; null if nobody logged them
    max_over_mean: Amount  #: heaviest rank over the mean
    deviation: Amount  #: its standard deviation over the steps


class LoadFit(Struct, frozen=True):
    """Time against tokens, of the experts of a rank or of a transfer (most tokens of any rank): seconds = base + per
    token x tokens.
    """

    phase: str  #: `experts-forward`, `experts-backward`, `dispatch` or `combine`
    base_s: Finite  #: seconds without tokens
    per_token_s: Finite  #: seconds for each token; of transfers, for each row of the rank with most
    r2: AtMostOne  #: share of the variance that it explains


class Rebalanced(Struct, frozen=True):
    """A plan and its price, seconds a step; null where it is not known."""

    plan: str  #: as asked for
    step_time_s: Seconds | None = None  #: the step; null if only bounds are known, or nothing
    low_s: Number = None  #: its least
    high_s: Number = None  #: its most
    saved_s: Number = None  #: what it saves
    error_s: Seconds | None = None  #: two standard errors of the fits
    dropped_share: Proportion | None = None  #: of all tokens, beyond the capacity
    placement: list[Placement] | None = None  #: for each layer, pairs of expert and rank
    chunks: Count | None = None  #: the best number of chunks
    unknown: str | None = None  #: why there is no price


class CauseOfImbalance(Struct, frozen=True):
    """Why ranks wait for each other in all-to-alls."""

    cause: ExpertCause  #: `hot-expert`, `hot-rank`, `rotating`, `skew`, `late-peer` or `one-launch-queue`
    rank: Ordinal | None  #: the rank, if it is one
    expert: Count | None  #: the expert that is heaviest in all steps of most layers, if it is one
    layers: list[Count]  #: layers with more than 5 % beyond the mean
    saved_s: Finite  #: seconds a step with equal loads, or without the late peer


class Experts(Struct, frozen=True):
    """Loads of experts."""

    #: `splits` (rows of all-to-alls), `loads` (the log), `kernel-times`; null if none shows them
    source: LoadSource | None
    cut: bool  #: whether the profiler cut the lists of rows
    layers: list[LayerLoads]  #: layers of experts in order
    fits: list[LoadFit]  #: times against tokens
    rebalance: list[Rebalanced]  #: the plans that were asked for
    #: why ranks wait for each other in all-to-alls; empty if that costs less than 1 % of the step
    causes: list[CauseOfImbalance]
    notes: list[str]  #: what to know about the loads


class PlacedLayer(Struct, frozen=True):
    """The experts of one layer on ranks: `placement`, pairs of expert and rank."""

    layer: int
    placement: Placement
    max_over_mean: float


class PlanTimes(Struct, frozen=True):
    """Seconds: of the plan in use and of the best one, null if none fits."""

    now: float
    best: float | None


class PlanSettings(Struct, frozen=True):
    """A plan in the terms of frameworks. `bucket_cap_mb`: the one limit that comes closest to the buckets of the plan,
    with which DistributedDataParallel takes `step_time_s`; null without reductions. `layers`: of each stage;
    `recompute_layers`: their numbers, from 0. `paste`: framework -> settings to copy.
    """

    bucket_cap_mb: float | None
    step_time_s: float
    layers: list[int]
    microbatches: int
    recompute_layers: list[int]
    paste: dict[str, str]


class FrontPlan(Struct, frozen=True, kw_only=True):
    """A plan. `memory_gb`: of the fullest stage, null if unknown."""

    memory_gb: float | None
    step_time_s: float
    split: list[int]
    schedule: str
    microbatches: int
    recompute: list[bool]


class OptimizedPlan(FrontPlan, frozen=True, kw_only=True):
    """A plan of those found. `bound_s`: nothing in the space is faster. `buckets`: of each stage, how many layers each
    bucket holds, last layers first. `tied`: closer to the best plan than the replay can tell apart.
    """

    saved_s: float
    bound_s: float
    buckets: list[list[int]]
    settings: PlanSettings
    tied: bool


class Searched(Struct, frozen=True):
    """Plans of the space, before memory, and how many of them were replayed."""

    plans: int
    replayed: int


class Optimum(Struct, frozen=True):
    """What `tracekit optimize` found. `plans`: best first, none if nothing fits, with the `reason`. `nothing_to_gain`:
    the plan in use fits and no plan is faster than it. `gap`: by what share of its step a plan may still be faster than
    the best one: 0 if the space was searched to the end. `front`: the fastest plan at each size of memory, smallest
    first; none if memory is unknown. `limit_gb`: of memory, null: none; `now`: the plan in use. `error`: how far
    the replay is from the recording, relative; 0 for a model file. `notes`: what the figures rest on.
    `moves`: fixes in the report of a recorded job that change its plan.
    """

    step_time_s: PlanTimes
    plans: list[OptimizedPlan]
    nothing_to_gain: bool
    searched: Searched
    reason: str | None
    front: list[FrontPlan]
    limit_gb: float | None
    now: FrontPlan
    gap: float = 0.0
    error: float = 0.0
    notes: list[str] = []
    moves: list[Fix] = []


class StepLine(Struct, frozen=True):
    """A step takes `per_microbatch_s` for each microbatch of a pipeline, and `fixed_s`."""

    per_microbatch_s: float
    fixed_s: float


class ConfidenceInterval(Struct, frozen=True):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


class RunOfMicrobatches(Struct, frozen=True):
    """The step time of a run with so many microbatches."""

    microbatches: int
    step_time_s: ConfidenceInterval


class RunLine(Struct, frozen=True):
    """What `tracekit optimize --runs` found."""

    line: StepLine
    microbatches: list[RunOfMicrobatches]
