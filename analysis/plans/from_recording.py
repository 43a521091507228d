"""The model of a recorded pipeline, for a search for better plans.

In: a pipeline under diagnosis, and the figures of its gradients in its metadata. Out: a `RecordedModel`. What a
recording does not show stays as it is, and a note says so: without sizes of gradients, buckets are not changed; without
the cost of reductions of several sizes, neither; without layers, nothing moves between stages.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.bubbles.schedules import AskedSchedule, RecordedPipeline, recorded_pipelines
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import stage_slowness, usual_base_s
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.plans.best_plans import search, stage_model, timed
from tracekit.analysis.plans.model import PlanModel, Reduction, Space, TrainingPlan, layers_of
from tracekit.analysis.plans.stages import DEFAULT_MB, buckets_of_size
from tracekit.base.errors import TraceError
from tracekit.base.text import seconds
from tracekit.trace.compute_order import Schedule

FOLLOWS_SIZE = "computes follow the size of microbatches; launches and transfers do not"
FOLLOWS_GRADIENTS = "computes of a layer take as long as its share of the gradients, backwards of those of its bucket"
NO_LAYERS = "layers of stages are not known (--layers), so no layer moves"
NO_SIZES = "sizes of gradients were not recorded (`collect` does), so buckets stay as they are"
ONE_SIZE = "reductions of one size (on CPUs, try `collect --buckets`): their fixed cost is unknown, so buckets stay"
BEST_SIZE = "no other size of buckets saves more than the error, so it stays"
NO_DELAY = "how much reductions slow the backward down was not recorded (one microbatch, no times of the thread)"
ONE_RANK = "one data-parallel rank: no gradients are reduced"
#: A pipeline whose model takes longer than the recording by more than this is not described by it. Chosen.
MOST_BEYOND = 0.02
#: 95 % of means are this close to the true one.
STANDARD_ERRORS = 1.96
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
#: Sizes of gradients are in MiB, as DistributedDataParallel counts.
MB = 1 << 20
#: Reductions show what a byte costs if their sizes differ by this factor. Chosen.
SIZES_APART = 1.5
#: Rates that are tried, and how much the errors of rates that explain a recording equally well differ. Chosen.
_RATES, _ALIKE = np.linspace(0.02, 1.0, 99), 1e-3
#: A backward that reductions slow down further would be at a standstill. Chosen.
LEAST_RATE = 0.05


class Gradients(Struct, frozen=True):
    """What `collect` records of gradients. `bytes`: of each layer, by stage; `reductions`: rows of `Buckets`;
    `bucket_cap_mb`, `first_bucket_mb`: when DistributedDataParallel closes a bucket; `delay_s`: how much reductions
    delay the last backward, by the processor time of its thread, None if unknown, and its standard error;
    `copy_per_mb_s`, `at_once`: of a `Reduction`.
    """

    bytes: list[list[Annotated[int, msgspec.Meta(gt=0)]]]
    reductions: list[tuple[_Amount, _Amount, _Amount, _Amount]] = []
    bucket_cap_mb: float = DEFAULT_MB
    first_bucket_mb: float = 1.0
    delay_s: _Amount | None = None
    delay_error_s: _Amount = 0.0
    copy_per_mb_s: _Amount = 0.0
    at_once: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class RecordedModel(Struct, frozen=True):
    """A model with the relative `error` of its step times, and what it rests on. `first_bucket_mb`: see `Gradients`."""

    model: PlanModel
    error: float
    notes: tuple[str, ...]
    first_bucket_mb: float

    def plan_with(self, split: tuple[int, ...]) -> TrainingPlan:
        """The plan in use with another split: buckets are closed at the sizes in use."""
        model, cap_mb = self.model, self.model.bucket_cap_mb or np.inf
        sizes_mb = model.of_layers("gradient_mb")
        return replace(model.now, split=split, buckets=_buckets(sizes_mb, split, cap_mb, self.first_bucket_mb))


def recorded_model(job: PipelineSubject, split: tuple[int, ...] | None) -> RecordedModel:
    """The model of a job. `split`: the layers of each stage, None if unknown.

    Raises TraceError for a job whose schedule or steps it does not describe.
    """
    assert job.profile is not None, "the job computes"
    pipeline, base_s, slowness = _pipeline(job), usual_base_s(job), stage_slowness(job)
    schedule = _schedule(pipeline)
    count, pipelined, gradients = pipeline.order.microbatches, job.stages > 1, _gradients(job)
    sizes_mb = np.array([size / MB for stage in gradients.bytes for size in stage])
    notes, moves = [FOLLOWS_SIZE], split is not None and pipelined
    takes_s = base_s.sum(axis=2) if split is None else stage_model(base_s, split).of_layers_s
    by_gradients = split is None and len(sizes_mb) > 0 and not pipelined
    if by_gradients:
        takes_s, split = takes_s * sizes_mb / sizes_mb.sum(), (len(sizes_mb),)
        notes.append(FOLLOWS_GRADIENTS)
    elif split is None:
        split = (1,) * job.stages
        notes.append(NO_LAYERS)
    fixed_s = np.median(pipeline.delay, axis=(1, 2, 3)).clip(0.0) * job.stages / sum(split)
    fitted, why = None, ONE_RANK if len(job.dp_ranks) == 1 else NO_SIZES
    if len(job.dp_ranks) > 1 and len(sizes_mb) == sum(split):
        fitted, why = _reduced(job, gradients, sizes_mb, split), ONE_SIZE
    reduced = fitted or _Reduced(Reduction(0.0, 0.0), tuple((layer_count,) for layer_count in split), (why,))
    if by_gradients and reduced.backward_s is not None:
        takes_s[BACKWARD] = reduced.backward_s / slowness[0]  # as recorded, it waits for a slow worker
    buckets: Literal["free", "size", "one"] = "one"
    if fitted:
        buckets = "free" if pipelined else "size"
    model = PlanModel(
        name=job.trace.name,
        layers=layers_of(takes_s[[FORWARD, BACKWARD]], fixed_s, sizes_mb if fitted else np.zeros(sum(split))),
        stages=job.stages,
        replicas=len(job.dp_ranks) if fitted else 1,  # what is not fitted is part of the rest of the step
        samples=count,
        transfer_s=(float(np.median(pipeline.transfer)) if pipeline.transfer.size else 0.0, 0.0),
        reduce=reduced.cost,
        optimizer_s=0.0,
        slowness=tuple(slowness.tolist()),
        bucket_cap_mb=gradients.bucket_cap_mb if fitted else None,
        now=TrainingPlan(split, schedule, count, (False,) * job.stages, reduced.buckets),
        space=Space(
            schedule=[schedule, Schedule.ONE_F_ONE_B] if pipelined else "fixed",
            microbatches=[number for number in (count // 2, count, 2 * count) if number] if pipelined else "fixed",
            split="free" if moves else "fixed",
            buckets=buckets,
        ),
    )
    return _calibrated(job, RecordedModel(model, 0.0, (*notes, *reduced.notes), gradients.first_bucket_mb), reduced)


def _buckets(sizes_mb: Floats, split: tuple[int, ...], cap_mb: float, first_mb: float) -> tuple[tuple[int, ...], ...]:
    """The buckets of each stage."""
    parts = np.split(sizes_mb, np.cumsum(split)[:-1])
    return tuple(buckets_of_size(part.tolist(), cap_mb, first_mb) for part in parts)


def _calibrated(job: PipelineSubject, recorded: RecordedModel, reduced: _Reduced) -> RecordedModel:
    """The model with its error, and with what the recording takes beyond it as the optimizer's time.

    Raises TraceError if the recording takes less.
    """
    model, notes = recorded.model, recorded.notes
    if (problem := model.problem) is not None:
        raise TraceError(f"{job.trace.name}: {problem}")
    modelled_s, recorded_s = timed(model, model.now).step_time_s, job.recorded_s
    beyond = modelled_s / recorded_s - 1
    if beyond > MOST_BEYOND and reduced.backward_s is None:
        raise TraceError(
            f"{job.trace.name}: plans cannot be compared: by its computes, transfers and reductions, a step takes"
            f" {beyond:.1%} longer than recorded: they overlap or vary; write a model file instead (docs/plans.md)"
        )
    error = max(job.replay_error, reduced.unsure_s / recorded_s, beyond)
    if reduced.backward_s is not None:  # the cost of buckets is no better known than the steps that show it
        steps_s = job.replay.recorded_step_times()
        error = max(error, STANDARD_ERRORS * float(steps_s.std() / steps_s.mean()) / len(steps_s) ** 0.5)
    if model.stages > 1 and model.replicas > 1 and (contention := _contention(job) or 0.0) > 0:
        notes = (*notes, f"a backward takes {contention:.1%} longer while gradients are reduced")
        backward_s = float(model.of_layers("backward_s", 1.0).sum()) / model.stages
        error = max(error, contention * backward_s / recorded_s)
    model = replace(model, optimizer_s=max(recorded_s - modelled_s, 0.0))
    if model.space.buckets == "size":  # what would be left of the gain if reductions slowed the backward down further
        best = search(model, None).plans[0].plan
        slower = replace(model, reduce=replace(model.reduce, compute_rate=reduced.least_rate))
        gains_s = [timed(case, case.now).step_time_s - timed(case, best).step_time_s for case in (model, slower)]
        error += max(gains_s[0] - gains_s[1], 0.0) / recorded_s  # a bound, not chance: it adds up
        if gains_s[0] <= max(recorded_s, modelled_s) * error:
            model, notes = replace(model, space=replace(model.space, buckets="fixed")), (*notes, BEST_SIZE)
    return replace(recorded, model=model, error=error, notes=notes)


def _pipeline(job: PipelineSubject) -> RecordedPipeline:
    pipelines, _ = recorded_pipelines(job.replay)
    if not pipelines:
        raise TraceError(f"{job.trace.name}: no step has all computes of every microbatch; plans cannot be compared")
    return max(pipelines, key=lambda pipeline: pipeline.lanes)


def _schedule(pipeline: RecordedPipeline) -> Schedule:
    order = pipeline.order
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.GPIPE):
        asked = AskedSchedule.parse(schedule).order(order.stages, order.microbatches)
        if order.virtual_stages == order.stages and np.array_equal(asked.kind, order.kind):
            return schedule
    raise TraceError("plans are compared with 1F1B and GPipe; this pipeline computes in another order")


def _gradients(job: PipelineSubject) -> Gradients:
    try:
        return msgspec.convert(job.metadata.get("gradients"), Gradients)
    except msgspec.ValidationError:  # none, or of another version
        return Gradients([])


class _Reduced(Struct, frozen=True):
    """What reductions take, and the buckets in use. `unsure_s`: how far a step may be off because of the fit.
    `backward_s`: seconds of the backward of each layer alone. `least_rate`: the least `compute_rate` that the recording
    may show.
    """

    cost: Reduction
    buckets: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]
    unsure_s: float = 0.0
    backward_s: Floats | None = None
    least_rate: float = 1.0


def _reduced(job: PipelineSubject, gradients: Gradients, sizes_mb: Floats, split: tuple[int, ...]) -> _Reduced | None:
    """What the reductions take; None if their sizes are too close to tell."""
    assert job.profile is not None, "the job computes"
    recorded, contention = Buckets.of(gradients.reductions), _contention(job)
    delay_s, rate, backward_s = None, None, None
    if job.stages == 1 and len(recorded.size_mb):
        # Earlier backwards of the step show the delay. Without any, the processor time of the training thread does.
        delay_s = gradients.delay_s if contention is None else contention * float(job.profile.base_s[BACKWARD].sum())
        rate = recorded.compute_rate(delay_s or 0.0)
    fitted = recorded.fitted(rate)
    if fitted is None:
        return None
    cost = fitted.cost
    if job.stages == 1:
        cost = replace(cost, copy_per_mb_s=gradients.copy_per_mb_s, at_once=gradients.at_once)
    notes = [f"a reduction takes {seconds(cost.fixed_s)} and {seconds(cost.per_mb_s)} a MiB, within {fitted.error:.1%}"]
    if rate is not None and recorded.ready_s.max() > 0:
        backward_s = np.diff(recorded.computed_until(sizes_mb, rate), prepend=0.0)[::-1]
        speeds = (
            f"while both run, the backward has {cost.compute_rate:.0%} of its speed, reductions {cost.reduce_rate:.0%}"
        )
        notes.append(speeds if delay_s is not None else NO_DELAY)
    buckets = _buckets(sizes_mb, split, gradients.bucket_cap_mb, gradients.first_bucket_mb)
    # The line is off by its error of each reduction, the step only by that of all reductions.
    off_s = fitted.error * float((cost.fixed_s + cost.per_mb_s * recorded.size_mb).sum())
    least_rate = 1 - cost.reduce_rate  # what the reduction gets, the backward loses
    if delay_s is not None:
        seen_rate = recorded.compute_rate(delay_s + STANDARD_ERRORS * gradients.delay_error_s)
        # Other backwards of a step show all of the delay; processor time shows waits for cores, not for shared memory.
        least_rate = seen_rate if contention is not None else min(least_rate, seen_rate)
    return _Reduced(cost, buckets, tuple(notes), off_s + fitted.unsure_s, backward_s, max(least_rate, LEAST_RATE))


def _contention(job: PipelineSubject) -> float | None:
    """How much longer the last backward of a step takes, in which gradients are reduced, than the others, relative;
    None without others.
    """
    assert job.profile is not None, "the job computes"
    position = job.profile.position[BACKWARD]
    return max(float(position[-1] / np.median(position[:-1])) - 1, 0.0) if len(position) > 1 else None


class FittedReduction(Struct, frozen=True):
    """The cost of a reduction. `error`: of its line, relative; `unsure_s`: how much the step time of other buckets may
    be off because several rates explain the recording.

    Its rates follow from what no plan changes: a bucket needs the same service, fixed_s + per_mb_s x MiB, wherever it
    runs. Beside a backward it gets `reduce_rate` of a second in each second.
    """

    cost: Reduction
    error: float
    unsure_s: float


class Buckets(Struct, frozen=True, eq=False):
    """Buckets of a step, [buckets]: MiB, seconds of service alone and during the backward, and seconds from the start
    of the last backward until each was ready.
    """

    size_mb: Floats
    alone_s: Floats
    beside_s: Floats
    ready_s: Floats

    @classmethod
    def of(cls, rows: list[tuple[float, float, float, float]]) -> Buckets:
        """The buckets of recorded rows (bytes, alone, in the backward, ready), without those of no length."""
        size, alone, in_backward, ready = np.array([row for row in rows if row[1] + row[2] > 0], float).reshape(-1, 4).T
        return cls(size / MB, alone, in_backward, ready)

    def compute_rate(self, delay_s: float) -> float:
        """How fast the backward computes while gradients are reduced, if that delays it by `delay_s`."""
        beside_s = float(self.beside_s.sum())
        return float(np.clip(1 - delay_s / beside_s, LEAST_RATE, 1.0)) if beside_s > 0 else 1.0

    def fitted(self, compute_rate: float | None) -> FittedReduction | None:
        """The cost; None if sizes are too close. `compute_rate`: None to leave contention out.

        Of rates that explain the recording equally well, the one closest to a constant sum: what the reduction gets,
        the backward loses. Then buckets that overlap more gain nothing, and none are proposed for that.
        """
        sizes = self.size_mb
        if not len(sizes) or sizes.max() < SIZES_APART * sizes.min():
            return None
        shared = compute_rate is not None and self.beside_s.sum() > 0
        rates = _RATES if shared else np.ones(1)
        lines = [_line(sizes, self.alone_s + rate * self.beside_s) for rate in rates]
        errors = np.array([error for _, _, error in lines])
        alike = np.flatnonzero(errors <= errors.min() + _ALIKE)
        chosen = int(alike[np.abs(rates[alike] - (1 - (compute_rate or 0.0))).argmin()])
        fixed_s, per_mb_s, error = lines[chosen]
        cost = Reduction(fixed_s, per_mb_s, compute_rate if shared and compute_rate else 1.0, float(rates[chosen]))
        spread = float(np.abs(rates[alike] - rates[chosen]).max())
        return FittedReduction(cost, error, spread * float(self.beside_s.sum()))

    def computed_until(self, gradients_mb: Floats, compute_rate: float) -> Floats:
        """Seconds that the backward of the last layer, the last two, ... takes alone, [layers].

        Buckets show when their layers were computed; within a bucket, time follows the gradients.
        """
        order = np.argsort(self.ready_s, kind="stable")
        ready_s, size_mb = self.ready_s[order], np.cumsum(self.size_mb[order])
        recorded_s, first_s = float(ready_s[-1]), float(ready_s[0])
        alone_s = max(recorded_s - (1 - compute_rate) * float(self.beside_s.sum()), first_s)
        later = (ready_s - first_s) * ((alone_s - first_s) / max(recorded_s - first_s, 1e-12))
        at_mb = np.cumsum(gradients_mb[::-1]) * (size_mb[-1] / gradients_mb.sum())
        computed_s = np.interp(at_mb, np.concatenate([[0.0], size_mb]), np.concatenate([[0.0], first_s + later]))
        return np.asarray(computed_s)


def _line(sizes_mb: Floats, takes_s: Floats) -> tuple[float, float, float]:
    """The line a + b x MiB through these times, neither below 0, and its mean relative error."""
    rows = np.stack([np.ones(len(sizes_mb)), sizes_mb], axis=1) / np.maximum(takes_s, 1e-12)[:, None]
    lines = []
    for columns in ([0, 1], [0], [1]):
        line = np.zeros(2)
        line[columns] = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
        lines.append((float(line[0]), float(line[1]), float(np.abs(rows @ line - 1).mean())))
    return min((line for line in lines if min(line[:2]) >= 0), key=lambda line: line[2])
