"""The bubbles of a job: where its stages are idle, why, and what other schedules would cost.

In: a `JobReplay` and the schedules to price. Out: `Bubbles`, the data of the report, means of all lanes. Every idle
interval has a place; Shapley's value divides idle time among causes; a schedule is priced by replaying its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import factorial

import numpy as np
from msgspec import Struct

from tracekit.analysis.bubbles.schedules import (
    BACKWARD,
    WEIGHT,
    AskedSchedule,
    ComputeOrder,
    RecordedPipeline,
    recorded_pipelines,
)
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.base.errors import LayoutError
from tracekit.report.questions import (
    Bubbles,
    CauseOfIdle,
    Idle,
    IdleOfStage,
    LeftOut,
    LostTo,
    PlaceOfIdle,
    PricedSchedule,
    ReasonOfIdle,
    StageBubbles,
)

#: Computes of a stage that overlap by more than this share of the window do not follow each other. Chosen.
MOST_OVERLAP = 1e-3

PLACES: tuple[PlaceOfIdle, ...] = ("warm-up", "between", "drain")
REASONS: tuple[ReasonOfIdle, ...] = ("peer", "transfer", "collective", "host")
#: A gap of this many seconds can hold other work. Chosen.
USABLE_S = 50e-6
#: What can be switched off; what all of them leave unexplained is the host's.
SWITCHES: tuple[CauseOfIdle, ...] = ("transfers", "jitter", "workers", "stages", "dependency")
#: The share of the weight gradients in a whole backward, least and most, if it is not known. Chosen.
WEIGHT_SHARES = (1 / 3, 1 / 2)
V_SHAPED = "the recorded schedule is V-shaped, which is supported for places only"


def find_bubbles(replay: JobReplay, schedules: Sequence[str] = ()) -> Bubbles:
    """Find where the stages of a pipeline are idle, why, and what these schedules would cost.

    Raises SelectionError for a schedule that does not exist.
    """
    asked = [AskedSchedule.parse(text) for text in schedules]
    recorded, incomplete = recorded_pipelines(replay)
    steps = product(replay.left_out_steps, replay.graph.dp_ranks)  # in which a DP rank is missing
    left_out = [LeftOut(*lane) for lane in sorted({*replay.graph.dropped_lanes, *steps, *incomplete})]
    lanes = sum(pipeline.lanes for pipeline in recorded)
    if not lanes:
        return _unknown("no step has all computes of every microbatch on all stages", left_out)
    places = [find_places(pipeline) for pipeline in recorded]
    window = sum(group.window_s for group in places) / lanes
    if max(group.overlap_s for group in places) > MOST_OVERLAP * window:
        return _unknown("computes of one stage overlap, so that its idle time is not defined", left_out)
    work, idle = (_mean([getattr(group, name) for group in places], lanes) for name in ("work_s", "idle_s"))
    idle_s = float(idle.sum()) / len(work)
    v_shaped = any(pipeline.order.v_shaped for pipeline in recorded)
    factors = [factors_of(pipeline) for pipeline in recorded]
    outside = float(replay.recorded_step_times().mean()) - window
    return Bubbles(
        window_s=window,
        work_s=float(work.mean()),
        idle_s=idle_s,
        share=idle_s / window if window else 0.0,
        places=[
            Idle(place, reason, float(idle[:, place_number, why].sum()) / len(work))
            for place_number, place in enumerate(PLACES)
            for why, reason in enumerate(REASONS)
            if idle[:, place_number, why].any()
        ],
        by_stage=_stages(recorded, places, idle, lanes),
        causes=[] if v_shaped else _causes(recorded, factors, idle_s),
        causes_unknown=V_SHAPED if v_shaped else None,
        schedules=[_priced(recorded, factors, schedule, window, outside) for schedule in asked],
        unknown=None,
        left_out=left_out,
    )


def _unknown(why: str, left_out: list[LeftOut]) -> Bubbles:
    return Bubbles(None, None, None, None, [], [], [], why, [], why, left_out)


def _mean(of_groups: Sequence[Floats], lanes: int) -> Floats:
    """The mean per lane, from sums over the lanes of each group."""
    return np.asarray(np.sum(of_groups, axis=0) / lanes)


def _stages(
    recorded: Sequence[RecordedPipeline], places: Sequence[Places], idle: Floats, lanes: int
) -> list[StageBubbles]:
    work, usable = (_mean([getattr(group, name) for group in places], lanes) for name in ("work_s", "usable_s"))
    peaks = _mean([pipeline.order.peak_microbatches * pipeline.lanes for pipeline in recorded], lanes)
    return [
        StageBubbles(
            pp_rank=stage,
            work_s=float(work[stage]),
            idle_s=float(idle[stage].sum()),
            usable_s=float(usable[stage]),
            peak_microbatches=float(peaks[stage]),
            places=[
                IdleOfStage(
                    PLACES[place],
                    REASONS[why],
                    int(other) - 1 if other else None,
                    float(idle[stage, place, why, other]),
                )
                for place, why, other in np.argwhere(idle[stage] > 0)
            ],
        )
        for stage in range(len(work))
    ]


def _causes(recorded: Sequence[RecordedPipeline], factors: Sequence[Factors], idle_s: float) -> list[LostTo]:
    lane_counts = [pipeline.lanes for pipeline in recorded]
    by_pipeline = [find_causes(pipeline, of_pipeline) for pipeline, of_pipeline in zip(recorded, factors, strict=True)]
    lost: dict[CauseOfIdle, float] = {
        switch: sum(lost_s[switch] * count for lost_s, count in zip(by_pipeline, lane_counts, strict=True))
        / sum(lane_counts)
        for switch in SWITCHES
    }
    lost["host"] = idle_s - sum(lost.values())
    return [LostTo(cause, lost[cause]) for cause in sorted(lost, key=lambda cause: -lost[cause])]


def _priced(
    recorded: Sequence[RecordedPipeline],
    factors: Sequence[Factors],
    asked: AskedSchedule,
    window: float,
    outside: float,
) -> PricedSchedule:
    """The price of a schedule. `outside`: seconds of a step outside the window."""
    try:
        planned = [plans(pipeline, of_pipeline, asked) for pipeline, of_pipeline in zip(recorded, factors, strict=True)]
    except LayoutError as error:
        return PricedSchedule(asked.text, None, None, None, None, None, None, str(error), None)
    lanes = [pipeline.lanes for pipeline in recorded]
    windows_s = [[plan.window_s for plan in of_lanes] for of_lanes in planned]
    low, high = (sum(map(bound, windows_s)) / sum(lanes) for bound in (min, max))
    held = [of_lanes[0].order.peak_microbatches * count for of_lanes, count in zip(planned, lanes, strict=True)]
    assumed = (assumptions(pipeline, of_lanes) for pipeline, of_lanes in zip(recorded, planned, strict=True))
    exact_s = low if low == high else None
    return PricedSchedule(
        schedule=asked.text,
        window_s=exact_s,
        step_time_s=None if exact_s is None else exact_s + outside,
        low_s=low,
        high_s=high,
        saved_s=None if exact_s is None else window - exact_s,
        peak_microbatches=_mean(held, sum(lanes)).tolist(),
        refused=None,
        assumes="; ".join(dict.fromkeys(text for words in assumed for text in words)),
    )


class Places(Struct, frozen=True, eq=False):
    """Seconds, sums over lanes. `window_s`: from the first start to the last end of any compute. `work_s`, `usable_s`:
    [stages]. `idle_s`: [stages, places, reasons, 1 + stages], the last by what is waited for: no stage, or which.
    `overlap_s`: the most that computes of one stage overlap in one lane.
    """

    window_s: float
    work_s: Floats
    usable_s: Floats
    idle_s: Floats
    overlap_s: float


class Gaps(Struct, frozen=True, eq=False):
    """The gap before each compute of a stage, in all lanes. `cuts`: where it begins, where each of `REASONS` ends, [5,
    computes, lanes]. `waits_for`: the stage whose result the compute needs, -1: none, [computes]. `work_s`: time in
    which nothing else computes, `overlap_s`: time in which the compute before runs, too, [computes, lanes]. `until`:
    when the last compute ends, [lanes].
    """

    cuts: Floats
    waits_for: Ints
    work_s: Floats
    overlap_s: Floats
    until: Floats


def gaps_of(recorded: RecordedPipeline, stage: int) -> Gaps:
    """Cut every gap of one stage.

    A gap is cut at the end of what the compute needs from another stage (until then the stage waits for its `peer`) and
    at the end of the receive (until then for the `transfer`); the rest is the `host`'s. If a gathering of parameters
    ended last, it is a `collective`.
    """
    order, start, end = recorded.order, recorded.start, recorded.end
    rows = np.flatnonzero(order.stage == stage)
    stage_rows = slice(int(rows[0]), int(rows[-1]) + 1)
    until = np.maximum.accumulate(end[stage_rows], axis=0)
    free = np.concatenate([start.min(axis=0)[None], until[:-1]])  # from when on the stage has nothing else to do
    low, high = np.minimum(free, start[stage_rows]), start[stage_rows]
    needs = order.needs[stage_rows]
    needed = np.where(needs[:, None] >= 0, end[needs], -np.inf)
    arrived = np.maximum(recorded.arrived[stage_rows], needed)
    gathered_at = recorded.gathered[stage_rows]
    gathered = gathered_at > arrived
    cuts = np.stack([low, *(np.clip(time, low, high) for time in (needed, arrived, gathered_at)), high])
    cuts[1:3] = np.where(gathered, low, cuts[1:3])
    cuts[3] = np.where(gathered, cuts[3], cuts[2])
    return Gaps(
        cuts=cuts,
        waits_for=np.where(needs >= 0, order.stage[needs], -1),
        work_s=np.maximum(end[stage_rows] - np.maximum(high, free), 0),
        overlap_s=free - low,
        until=until[-1],
    )


def find_places(recorded: RecordedPipeline) -> Places:
    """Name every idle interval of every stage."""
    order, stages = recorded.order, recorded.order.stages
    begin, finish = recorded.start.min(axis=0), recorded.end.max(axis=0)
    last_stage = order.stage[recorded.end.argmax(axis=0)]
    work, usable = np.zeros(stages), np.zeros(stages)
    idle = np.zeros((stages, len(PLACES), len(REASONS), stages + 1))
    overlap = 0.0
    for stage in range(stages):
        gaps = gaps_of(recorded, stage)
        overlap = max(overlap, float(gaps.overlap_s.sum(axis=0).max()))
        work[stage] = gaps.work_s.sum()
        cuts, waits_for = gaps.cuts, gaps.waits_for + 1
        place = np.minimum(np.arange(len(waits_for)), 1)
        no_stage = np.zeros_like(waits_for)
        for reason, waits in enumerate((waits_for, waits_for, no_stage, no_stage)):
            np.add.at(idle[stage, :, reason], (place, waits), (cuts[reason + 1] - cuts[reason]).sum(axis=1))
        drain, idle_s = finish - gaps.until, cuts[-1] - cuts[0]
        np.add.at(idle[stage, PLACES.index("drain"), REASONS.index("peer")], last_stage + 1, drain)
        usable[stage] = idle_s[idle_s > USABLE_S].sum() + drain[drain > USABLE_S].sum()
    return Places(float((finish - begin).sum()), work, usable, idle, overlap)


class Factors(Struct, frozen=True, eq=False):
    """Durations taken apart. `kind`: mean seconds of each kind, [kinds, 1, 1]. `level`: seconds of a usual worker on
    each virtual stage, [kinds, virtual stages, 1]. `worker`: how many times as long each worker takes, [kinds, virtual
    stages, lanes]. `jitter`: how many times as long each compute takes, [kinds, virtual stages, microbatches, lanes].
    """

    kind: Floats
    level: Floats
    worker: Floats
    jitter: Floats


def factors_of(recorded: RecordedPipeline) -> Factors:
    """Take the durations of a pipeline apart."""
    of_lane = recorded.duration.mean(axis=2)
    by_rank = np.argsort(recorded.dp_rank, kind="stable")
    _, first, rank, lanes = np.unique(
        recorded.dp_rank[by_rank], return_index=True, return_inverse=True, return_counts=True
    )
    of_worker = np.add.reduceat(of_lane[:, :, by_rank], first, axis=2) / lanes
    level = np.median(of_worker, axis=2, keepdims=True)
    kind = of_lane.mean(axis=(1, 2), keepdims=True)
    level = level * _ratio(kind, level.mean(axis=1, keepdims=True))  # the total work of each kind is kept
    worker = np.empty_like(of_lane)
    worker[:, :, by_rank] = _ratio(of_worker, np.broadcast_to(level, of_worker.shape))[:, :, rank]
    return Factors(kind, level, worker, _ratio(recorded.duration, (level * worker)[:, :, None]))


def find_causes(recorded: RecordedPipeline, factors: Factors) -> dict[CauseOfIdle, float]:
    """Idle seconds per lane that each switch causes; they add up to the idle time of a replay without launch delays.

    Each duration is the mean of its kind x a factor of its stage x one of its worker x jitter. Each factor is a switch,
    like the time of transfers and the dependencies between stages.
    """
    times = np.empty((2,) * len(SWITCHES))
    for jitter, workers, stages in product((0, 1), repeat=3):
        times[:, jitter, workers, stages, :] = _times(recorded, factors, bool(jitter), bool(workers), bool(stages))
    return dict(zip(SWITCHES, _shapley(times), strict=True))


def _times(recorded: RecordedPipeline, factors: Factors, jitter: bool, workers: bool, stages: bool) -> Floats:
    """Mean window with these factors, seconds, [without or with transfers, without or with dependencies]."""
    order, lanes = recorded.order, recorded.lanes
    usual = (factors.level if stages else factors.kind) * (factors.worker if workers else 1.0)
    cells = np.broadcast_to(usual[:, :, None] * (factors.jitter if jitter else 1.0), recorded.duration.shape)
    of_stage = cells.sum(axis=(0, 2)).reshape(-1, order.stages, lanes).sum(axis=0)
    free, durations = of_stage.max(axis=0).mean(), cells.reshape(-1, lanes)
    dependent = [order.windows(durations, transfers).mean() for transfers in (None, recorded.transfer)]
    return np.array([[free, window] for window in dependent])


def _shapley(times: Floats) -> list[float]:
    """Each switch's mean effect over all orders of switching on; `times`: [2, 2, ...], an axis for each switch."""
    count = times.ndim
    effects = []
    for switch in range(count):
        effect = np.take(times, 1, axis=switch) - np.take(times, 0, axis=switch)
        switched_on = np.indices(effect.shape).sum(axis=0)
        orders = [factorial(others) * factorial(count - 1 - others) for others in range(count)]
        effects.append(float((effect * np.array(orders)[switched_on]).sum() / factorial(count)))
    return effects


def _ratio(over: Floats, under: Floats) -> Floats:
    """The quotient; 1 where both are 0."""
    return np.divide(over, under, out=np.ones(np.broadcast_shapes(over.shape, under.shape)), where=under > 0)


def inverse(factor: Floats) -> Floats:
    """The reciprocal; 0 where the factor is 0."""
    return np.divide(1.0, factor, out=np.zeros_like(factor), where=factor > 0)


class TimedSchedule(Struct, frozen=True, eq=False):
    """A schedule with what its ops take: `durations`, [rows, lanes], `transfers` and launch `delays`, as in
    `ComputeOrder.windows`. `share`: of the weight gradients in the whole backward, if assumed.
    """

    order: ComputeOrder
    durations: Floats
    transfers: Floats
    delays: Floats
    share: float | None

    @property
    def window_s(self) -> float:
        """From the first start to the last end of any compute, seconds, the sum over lanes."""
        return float(self.order.windows(self.durations, self.transfers, self.delays).sum())

    def pipeline(self, dp_rank: Int32s) -> RecordedPipeline:
        """What would be recorded. `dp_rank`: of the lanes."""
        order, computes = self.order, len(self.order.kind)
        timeline = order.timeline(self.durations, self.transfers, self.delays)
        arrived = np.full((computes, len(dp_rank)), -np.inf)
        arrived[order.received] = timeline.end[computes:]
        return RecordedPipeline(
            order=order,
            dp_rank=dp_rank,
            start=timeline.start[:computes],
            end=timeline.end[:computes],
            arrived=arrived,
            gathered=np.full_like(arrived, -np.inf),
            transfer=timeline.end[computes:] - timeline.start[computes:],
        )


def plans(recorded: RecordedPipeline, factors: Factors, asked: AskedSchedule) -> list[TimedSchedule]:
    """The schedule asked for; if its share of weight gradients is unknown, with the smallest and the largest of
    `WEIGHT_SHARES`.

    Raises LayoutError if it cannot run in this pipeline.
    """
    if recorded.order.v_shaped:
        raise LayoutError(V_SHAPED)
    shares: Sequence[float | None] = WEIGHT_SHARES if asked.weight is None else (asked.weight,)
    if not asked.splits_backward or (recorded.kinds > WEIGHT and asked.weight is None):
        shares = (None,)  # as recorded
    order = asked.order(recorded.order.stages, recorded.order.microbatches)
    work, delay = _redistributed(recorded, factors, order.virtual_stages)
    if shares != (None,) or not asked.splits_backward:
        work, delay = _backward_whole(work, delay)
    transfers = recorded.usual_transfer[order.kind[order.received], order.stage[order.needs[order.received]]]
    return [_plan(order, work, delay, transfers, share) for share in shares]


def assumptions(recorded: RecordedPipeline, planned: Sequence[TimedSchedule]) -> list[str]:
    """What the price rests on, in words."""
    assumes = ["transfers as usual on their link"]
    if planned[0].order.virtual_stages != recorded.order.virtual_stages:
        assumes.append("layers spread evenly within a stage")
    if shares := [f"{schedule.share:.0%}" for schedule in planned if schedule.share is not None]:
        assumes.append(f"W takes {' to '.join(shares)} of the whole backward")
    return assumes


def _plan(order: ComputeOrder, work: Floats, delay: Floats, transfers: Floats, share: float | None) -> TimedSchedule:
    if share is not None:
        whole = work[BACKWARD]
        work = np.stack([work[0], whole * (1 - share), whole * share])
        delay = np.stack([*delay, delay[BACKWARD]])
    lanes = work.shape[-1]
    return TimedSchedule(order, work.reshape(-1, lanes), transfers, delay.reshape(-1, lanes)[order.cell], share)


def _backward_whole(work: Floats, delay: Floats) -> tuple[Floats, Floats]:
    """Backwards with their weight gradients, which are one op then."""
    if len(work) <= WEIGHT:
        return work, delay
    return (
        np.stack([work[0], work[BACKWARD] + work[WEIGHT]]),
        np.stack([delay[0], (delay[BACKWARD] + delay[WEIGHT]) / 2]),
    )


def _redistributed(recorded: RecordedPipeline, factors: Factors, virtual_stages: int) -> tuple[Floats, Floats]:
    """Work and launch delays of that many virtual stages, seconds, [kinds, virtual stages, microbatches, lanes].

    The layers are taken as spread evenly over each recorded stage. What the first and the last have beyond the median
    stays at the ends of the model (embedding, loss), and a slow worker stays slow.
    """
    old, stages = recorded.order.virtual_stages, recorded.order.stages
    work, delay = recorded.duration, recorded.delay
    if old == virtual_stages:
        return work, delay
    share = _overlaps(old, virtual_stages)
    # A worker's factor belongs to the rank: mean over its chunks.
    of_rank = factors.worker.reshape(recorded.kinds, -1, stages, recorded.lanes).mean(axis=1)
    usual = work * inverse(factors.worker)[:, :, None]
    median = np.median(factors.level, axis=1, keepdims=True)
    ends = np.zeros(factors.level.shape)
    for end in (0, -1):
        ends[:, end] = np.maximum(1 - median * inverse(factors.level[:, end : end + 1 or None]), 0)[:, 0]
    spread = np.einsum("nv,kvml->knml", share, usual * (1 - ends[:, :, None]))
    for end in (0, -1):
        spread[:, end] += usual[:, end] * ends[:, end, None]
    repeated = np.tile(of_rank, (1, virtual_stages // stages, 1))[:, :, None]
    mean_delay: Floats = np.einsum("nv,kvml->knml", share / share.sum(axis=1, keepdims=True), delay)
    return spread * repeated, mean_delay


def _overlaps(old: int, new: int) -> Floats:
    """The share of each old part of the model that each new one has, [new, old]; parts are equally long."""
    ends = np.arange(1, new + 1)[:, None] * old / new, np.arange(1, old + 1)[None]
    begins = np.arange(new)[:, None] * old / new, np.arange(old)[None]
    return np.asarray(np.maximum(np.minimum(*ends) - np.maximum(*begins), 0.0))
