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

from tracekit.base.quantities import Amount, AtMostOne, Count, Finite, Number, Ordinal, Proportion, Seconds
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
    """One custom what-if question and its answer.

    `step_time_s`: the mean recorded step after the edit, as fixes are priced; of `keep only`, T of its replay, without
    launch delays, and what it saves is compared with T(original). `error_s`: of `saved_s`, as of a fix.
    """

    question: str
    ops: Count
    step_time_s: Seconds
    saved_s: Finite
    error_s: Seconds
    saved_gpu_hours_per_day: Finite | None


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

    place: PlaceOfIdle
    reason: ReasonOfIdle
    idle_s: Seconds


class IdleOfStage(Struct, frozen=True):
    """Idle time of one stage at one place for one reason. `waits_for`: the stage that it waits for, if any."""

    place: PlaceOfIdle
    reason: ReasonOfIdle
    waits_for: Ordinal | None
    idle_s: Seconds


class StageBubbles(Struct, frozen=True):
    """One stage. `usable_s`: idle time in gaps that are long enough for other work. `peak_microbatches`: the most
    microbatches whose activations it holds at any time.
    """

    pp_rank: Ordinal
    work_s: Seconds
    idle_s: Seconds
    usable_s: Seconds
    peak_microbatches: Amount
    places: list[IdleOfStage]


class LostTo(Struct, frozen=True):
    """The part of the idle time that is due to one cause."""

    cause: CauseOfIdle
    lost_s: Seconds


class PricedSchedule(Struct, frozen=True):
    """What the pipeline would take under another schedule.

    `schedule`: as asked for. `window_s`, `step_time_s`, `saved_s`: null if only the bounds `low_s` and `high_s` of the
    window are known. `peak_microbatches`: of each stage. `refused`: why there are no figures, null if there are.
    `assumes`: what the price rests on.
    """

    schedule: str
    window_s: Seconds | None
    step_time_s: Seconds | None
    low_s: Number
    high_s: Number
    saved_s: Number
    peak_microbatches: list[Amount] | None
    refused: str | None
    assumes: str | None


class LeftOut(Struct, frozen=True):
    """A lane that is not part of the figures."""

    step: Ordinal
    dp_rank: Ordinal


class Bubbles(Struct, frozen=True):
    """The idle time of the stages of a pipeline.

    `window_s`: from the first start to the last end of any compute. `share`: of the window. `causes`: largest first.
    `unknown`: why there are no figures, `causes_unknown`: why there are no causes; null if there are.

    All figures are seconds per lane (one DP rank in one step, all its stages), means over the lanes.
    """

    window_s: Seconds | None
    work_s: Seconds | None
    idle_s: Seconds | None
    share: Proportion | None
    places: list[Idle]
    by_stage: list[StageBubbles]
    causes: list[LostTo]
    causes_unknown: str | None
    schedules: list[PricedSchedule]
    unknown: str | None
    left_out: list[LeftOut]


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
    """One rank, seconds of the recording.

    `both_s`: compute and communication at once; `exposed_s`: communication alone. `hidden_share`: of the communication;
    `efficiency`: of what could be hidden. `wait_s`: inside collectives, until the last member began (`peers`), or
    beyond the shortest kernel of that name, an upper bound (`minimum`). `sm_tax_at_most_s`: how much longer compute may
    have taken on the SMs that communication left it; null if the number of SMs is unknown.
    """

    rank: Ordinal
    compute_s: Seconds
    communication_s: Seconds
    both_s: Seconds
    exposed_s: Seconds
    hidden_share: Proportion
    efficiency: Proportion
    wait_s: Seconds
    wait_basis: WaitBasis
    sm_tax_at_most_s: Seconds | None


class OverlapOfCollective(Struct, frozen=True):
    """The communication kernels of one name, all ranks together."""

    name: str
    ops: Count
    seconds: Seconds
    exposed_s: Seconds
    wait_s: Seconds


class PhaseOps(Struct, frozen=True):
    """The GPU ops launched inside annotations of one name, such as "attn(F)", all ranks together."""

    phase: str
    ops: Count
    seconds: Seconds


class PhasePair(Struct, frozen=True):
    """How long communication of one phase ran while compute of another did, all ranks together."""

    communication: str
    compute: str
    seconds: Seconds


class Overlap(Struct, frozen=True):
    """Communication and compute at once. `assigned_ops`: of `gpu_ops`, those launched inside an annotation."""

    ranks: list[OverlapOfRank]
    collectives: list[OverlapOfCollective]
    phases: list[PhaseOps]
    pairs: list[PhasePair]
    gpu_ops: Count
    assigned_ops: Count


class LayerLoads(Struct, frozen=True):
    """One layer of experts, mean over the steps. `tokens_by_rank`: that each rank computes, ranks ascending.

    `max_over_mean`: of the ranks. `deviation`: of `max_over_mean` over the steps.
    """

    layer: Count
    tokens_by_rank: list[Amount]
    tokens_by_expert: list[Amount] | None
    max_over_mean: Amount
    deviation: Amount


class LoadFit(Struct, frozen=True):
    """Seconds = `base_s` + `per_token_s` x tokens, of the experts of a rank or of a transfer (most tokens of any rank).

    `r2`: the share of the variance that this explains.
    """

    phase: str
    base_s: Finite
    per_token_s: Finite
    r2: AtMostOne


class Rebalanced(Struct, frozen=True):
    """A plan and its price, seconds a step; null where it is not known, `unknown` says why.

    `low_s`, `high_s`: bounds of the step. `placement`: for each layer, pairs of expert and rank. `chunks`: the best
    number.
    """

    plan: str
    step_time_s: Seconds | None = None
    low_s: Number = None
    high_s: Number = None
    saved_s: Number = None
    error_s: Seconds | None = None
    dropped_share: Proportion | None = None
    placement: list[Placement] | None = None
    chunks: Count | None = None
    unknown: str | None = None


class CauseOfImbalance(Struct, frozen=True):
    """Why ranks wait for each other in all-to-alls. `saved_s`: a step, with equal loads or without the late peer."""

    cause: ExpertCause
    rank: Ordinal | None
    expert: Count | None
    layers: list[Count]
    saved_s: Finite


class Experts(Struct, frozen=True):
    """Loads of experts. `source`: where they were read, null if nowhere; `cut`: the profiler cut the lists of a group.

    `notes`: what to know about the loads, a sentence each.
    """

    source: LoadSource | None
    cut: bool
    layers: list[LayerLoads]
    fits: list[LoadFit]
    rebalance: list[Rebalanced]
    causes: list[CauseOfImbalance]
    notes: list[str]


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
