"""Synthetic traces with known stragglers.

In: a `SynthSpec`, the sizes of a job and the causes to inject. Out: a `Trace` with the labels in its metadata. The job
is simulated forwards, op by op of one lane's plan, each op for all lanes (step, dp_rank) at once. The simulator shares
no code with the analysis: a replay that reproduces its timestamps checks both.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.base.atomic_write import Kind, parquet_with, replacing
from tracekit.base.errors import SelectionError
from tracekit.synth.injected_causes import (
    ClockOffset,
    Effect,
    Floats,
    InjectedCause,
    JobShape,
    MissingRanks,
    MissingSteps,
    parse_cause,
)
from tracekit.synth.schedules import LanePlan, PlannedOp, plan_lane
from tracekit.trace.canonical import METADATA_KEY, Trace
from tracekit.trace.compute_order import Schedule, check_schedule
from tracekit.trace.model import DP_COLLECTIVES, Layout, OpKind, Worker
from tracekit.trace.schema import KIND_TYPE

#: Steps of a job, and microbatches of a step.
_MOST = 10_000_000
#: Profilers sample steps: the number of consecutive steps in a run, and the distance from one run to the next.
STEPS_IN_A_RUN = 10
STEPS_BETWEEN_RUNS = 100
FIRST_STEP = 100
#: Start of the first traced step, seconds since the epoch.
EPOCH_S = 1_750_000_000.0
#: Duration of a send or recv that transfers nothing, seconds.
NO_OP_S = 5e-6
#: By this, the free metadata tells simulated traces from recorded ones.
_FRAMEWORK = "synthetic"


def _is_simulated(header: str) -> bool:
    """Whether a trace with this header was simulated."""
    try:
        is_synthetic: bool = json.loads(header)["metadata"]["framework"] == _FRAMEWORK
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return is_synthetic


#: The kind of file that a simulated trace replaces: a recording cannot be made again.
SIMULATED_FILE = Kind("a trace that `tracekit synth` wrote", parquet_with(METADATA_KEY, _is_simulated))


@dataclass(frozen=True, slots=True)
class BaseCosts:
    """The cost of ops on a healthy job, seconds.

    Forward and backward: per microbatch on a stage with the average number of layers. A collective of the optimizer's
    shards is split over the model chunks. `launch_delay_s`: median time from when an op could start to its start.
    """

    forward_s: float = 0.020
    backward_s: float = 0.040
    p2p_s: float = 0.0005
    all_gather_s: float = 0.030
    reduce_scatter_s: float = 0.040
    separate_s: float = 0.004
    layernorm_s: float = 0.001
    embedding_s: float = 0.004
    clip_s: float = 0.002
    optimizer_s: float = 0.006
    gc_s: float = 0.0
    launch_delay_s: float = 0.000100

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not (math.isfinite(value) and value >= 0):
                raise SelectionError(f"base cost {item.name} is {value!r}; expected 0 or more seconds")


@dataclass(frozen=True, slots=True)
class SynthSpec:
    """A job to simulate.

    `noise`: relative spread (sigma of a lognormal with mean 1) of a compute op; communication and launch delays spread
    more. `worker_spread`: relative spread between workers, the same in all steps: no two GPUs are alike. `layers`:
    transformer layers per stage, which share the compute; None: equal. `record_no_ops`: with virtual stages also record
    sends and recvs that never ran, as Megatron-LM's profiler does. Raises SelectionError or LayoutError for an
    impossible job.
    """

    layout: Layout
    schedule: Schedule = Schedule.ONE_F_ONE_B
    microbatches: int = 8
    steps: int = 10
    overlap_dp: bool = False
    seed: int = 0
    noise: float = 0.02
    worker_spread: float = 0.0
    costs: BaseCosts = field(default_factory=BaseCosts)
    causes: tuple[InjectedCause, ...] = ()
    layers: tuple[int, ...] | None = None
    record_no_ops: bool = False
    name: str = "synthetic"

    def __post_init__(self) -> None:
        for size in ("microbatches", "steps"):
            if not 1 <= getattr(self, size) <= _MOST:
                raise SelectionError(f"{size} is {getattr(self, size)!r}; expected 1 to {_MOST:,}")
        if self.seed < 0:
            raise SelectionError(f"seed is {self.seed}; expected 0 or more")
        for spread in ("noise", "worker_spread"):
            if not 0 <= getattr(self, spread) <= 1:
                raise SelectionError(f"{spread} is {getattr(self, spread)!r}; expected 0 to 1, relative to a duration")
        if self.layers is not None and (len(self.layers) != self.layout.pp or min(self.layers) < 1):
            raise SelectionError(
                f"layers are {self.layers}; expected {self.layout.pp} counts of 1 or more, one per stage"
            )
        check_schedule(self.schedule, self.layout, self.microbatches)

    @property
    def shape(self) -> JobShape:
        """The sizes that causes use."""
        return JobShape(self.layout, self.steps, self.microbatches, self.layers or (1,) * self.layout.pp)

    @property
    def plan(self) -> LanePlan:
        """The ops of one DP rank in a step."""
        return plan_lane(
            self.schedule,
            self.layout,
            self.microbatches,
            overlap_dp=self.overlap_dp,
            record_no_ops=self.record_no_ops,
        )


def synthesize(spec: SynthSpec) -> Trace:
    """Simulate the job of `spec`. The same spec gives the same trace, bit for bit.

    Raises SelectionError for a cause outside the job, or for missing ranks that leave nothing to analyse.
    """
    shape, plan = spec.shape, spec.plan
    causes, effects = _settle(spec, shape)
    draws = _Draws(spec, shape, effects)
    times = _simulate(plan, shape, draws.cost, draws.delay)
    _shift_clocks(times.start, plan, shape, causes)
    step_numbers = [
        FIRST_STEP + i // STEPS_IN_A_RUN * STEPS_BETWEEN_RUNS + i % STEPS_IN_A_RUN for i in range(spec.steps)
    ]
    ops = _frame(plan, shape, np.array(step_numbers, np.int32), times)
    ops = _without_missing(ops, shape, step_numbers, causes)
    return Trace.from_frame(
        ops,
        spec.layout,
        name=spec.name,
        step_starts={step: EPOCH_S + (step - FIRST_STEP) * times.step_s for step in step_numbers},
        metadata=_metadata(spec, shape, causes),
        source=spec.name,
    )


def write_simulated(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a simulated trace; replaces only another one. Raises OutputError; never leaves half a file."""
    with replacing(path, SIMULATED_FILE) as temporary, open(temporary, "wb") as file:
        trace.write_to(file)


def _settle(spec: SynthSpec, shape: JobShape) -> tuple[tuple[InjectedCause, ...], tuple[Effect, ...]]:
    """The causes with their locations, and their effects. Each draws from the seed, its name and its ordinal."""
    causes, effects = [], []
    seen: dict[str, int] = {}
    for cause in spec.causes:
        ordinal = seen[cause.NAME] = seen.get(cause.NAME, -1) + 1
        rng = np.random.default_rng([spec.seed, zlib.crc32(cause.NAME.encode()), ordinal])
        causes.append(cause.located(shape, rng))
        effects.append(causes[-1].effect(shape, rng))
    return tuple(causes), tuple(effects)


@dataclass(frozen=True, slots=True)
class _Times:
    """Times of each op: seconds from the step's start, [ops of the plan, lanes]; `step_s`: the mean step."""

    start: Floats
    duration: Floats
    step_s: float


def _simulate(
    plan: LanePlan, shape: JobShape, cost: Callable[[PlannedOp], Floats], delay: Callable[[PlannedOp], Floats | float]
) -> _Times:
    """Run the plan in all lanes. Starts and ends follow the design's graph, see the module docstring."""
    size = (len(plan.ops), shape.lanes)
    start, end = np.empty(size), np.empty(size)
    for group in plan.groups:
        for number in group:
            op = plan.ops[number]
            start[number] = delay(op)
            if op.waits_for:
                ready = end[op.waits_for[0]]
                for before in op.waits_for[1:]:
                    ready = np.maximum(ready, end[before])
                start[number] += ready
        if not plan.ops[group[0]].kind.is_communication:
            end[group[0]] = start[group[0]] + cost(plan.ops[group[0]])
            continue
        latest = start[group[0]]
        for number in group[1:]:
            latest = np.maximum(latest, start[number])
        if plan.ops[group[0]].kind in DP_COLLECTIVES | {OpKind.OPTIMIZER_CLIP_MAIN_GRAD}:
            latest = np.repeat(latest.reshape(shape.steps, -1).max(axis=1), shape.layout.dp_ranks)
        for number in group:
            end[number] = latest + cost(plan.ops[number])
    step_s = float(end.max(axis=0).reshape(shape.steps, -1).max(axis=1).mean())
    end -= start
    return _Times(start, end, step_s)


@dataclass(frozen=True, slots=True)
class _Draws:
    """Costs and launch delays of an op in all lanes. Its random draws depend only on the seed and its `draw_key`."""

    spec: SynthSpec
    shape: JobShape
    effects: tuple[Effect, ...]

    def cost(self, op: PlannedOp) -> Floats:
        """Own cost of the op, seconds, [lanes]."""
        if op.no_op:
            return np.full(self.shape.lanes, NO_OP_S)
        spread = self.spec.noise * (2.5 if op.kind.is_communication else 1.0)
        cost = self._lognormal((*op.draw_key, 0), spread) * self._base(op)
        if self.spec.worker_spread and not op.kind.is_communication:
            rng = np.random.default_rng([self.spec.seed, op.pp_rank, 2])
            speeds = rng.lognormal(0, self.spec.worker_spread, self.shape.layout.dp_ranks)
            cost *= speeds[self.shape.dp_rank_of_lane]
        for factor in (effect.factor(op) for effect in self.effects):
            cost = cost if factor is None else cost * factor
        for pause in (effect.pause_s(op) for effect in self.effects):
            cost = cost if pause is None else cost + pause
        return cost

    def delay(self, op: PlannedOp) -> Floats:
        """Launch delay of the op, seconds, [lanes]."""
        key = (op.kind.code, op.pp_rank, op.seq, 1)
        delay = self._lognormal(key, min(1.0, 20 * self.spec.noise)) * self.spec.costs.launch_delay_s
        for late in (effect.late_s(op) for effect in self.effects):
            delay = delay if late is None else delay + late
        return delay

    def _lognormal(self, key: tuple[int, ...], sigma: float) -> Floats:
        """Lognormal with mean 1, [lanes]; in single precision, which is fine enough for noise and twice as fast."""
        if sigma == 0:
            return np.ones(self.shape.lanes)
        normal = np.random.default_rng([self.spec.seed, *key]).standard_normal(self.shape.lanes, dtype=np.float32)
        factor: Floats = np.exp(normal * np.float32(sigma) - np.float32(sigma * sigma / 2)).astype(np.float64)
        return factor

    def _base(self, op: PlannedOp) -> float:
        costs, layout, work = self.spec.costs, self.shape.layout, self.shape.chunk_work(op.pp_rank)
        return {
            OpKind.FORWARD_COMPUTE: costs.forward_s * work,
            OpKind.BACKWARD_COMPUTE: costs.backward_s * work,
            OpKind.PARAMS_ALL_GATHER: costs.all_gather_s / layout.vpp,
            OpKind.GRADS_REDUCE_SCATTER: costs.reduce_scatter_s / layout.vpp,
            OpKind.SEPARATE_GRADS_ALL_REDUCE: costs.separate_s,
            OpKind.LAYERNORM_GRADS_ALL_REDUCE: costs.layernorm_s,
            OpKind.EMBEDDING_GRADS_ALL_REDUCE: costs.embedding_s,
            OpKind.OPTIMIZER_CLIP_MAIN_GRAD: costs.clip_s,
            OpKind.OPTIMIZER: costs.optimizer_s,
            OpKind.GC: costs.gc_s,
        }.get(op.kind, costs.p2p_s)


def simulated_slowdown(spec: SynthSpec) -> float:
    """S of the job of `spec` by its definition, from the simulator's draws: no trace, no analysis.

    T(original) / T(ideal), both without launch delays; in the ideal job each compute takes the mean, each communication
    the median of its kind over all steps, DP ranks and stages.
    """
    shape, plan = spec.shape, spec.plan
    draws = _Draws(spec, shape, _settle(spec, shape)[1])
    sampled: dict[OpKind, list[Floats]] = {}
    for op in plan.ops:
        if not op.no_op:
            sampled.setdefault(op.kind, []).append(draws.cost(op))
    usual = {kind: (np.median if kind.is_communication else np.mean)(costs) for kind, costs in sampled.items()}

    def ideal_cost(op: PlannedOp) -> Floats:
        return draws.cost(op) if op.no_op else np.full(shape.lanes, usual[op.kind])

    original, ideal = (_simulate(plan, shape, cost, lambda _: 0.0) for cost in (draws.cost, ideal_cost))
    return original.step_s / ideal.step_s


def _shift_clocks(start: Floats, plan: LanePlan, shape: JobShape, causes: Sequence[InjectedCause]) -> None:
    """Add each clock's offset to the starts that its worker recorded (in place: `start` belongs to the simulation)."""
    for cause in causes:
        if isinstance(cause, ClockOffset):
            rows = [number for number, op in enumerate(plan.ops) if op.pp_rank == cause.pp_rank]
            start[rows] += np.where(shape.dp_rank_of_lane == cause.dp_rank, cause.offset_s, 0.0)


def _frame(plan: LanePlan, shape: JobShape, step_numbers: npt.NDArray[np.int32], times: _Times) -> pl.DataFrame:
    """Canonical columns, ordered by step, DP rank, stage, kind and seq."""
    order = sorted(
        range(len(plan.ops)),
        key=lambda number: (plan.ops[number].pp_rank, plan.ops[number].kind.code, plan.ops[number].seq),
    )
    ops = [plan.ops[number] for number in order]
    rows, lanes = len(ops), shape.lanes
    op_columns = pl.DataFrame(
        {
            "pp_rank": pl.Series([op.pp_rank for op in ops], dtype=pl.Int16),
            "kind": pl.Series([str(op.kind) for op in ops], dtype=KIND_TYPE),
            "seq": pl.Series([op.seq for op in ops], dtype=pl.Int32),
            "microbatch": pl.Series([op.microbatch for op in ops], dtype=pl.Int32),
            "chunk": pl.Series([op.chunk for op in ops], dtype=pl.Int16),
        }
    )
    dp_rank = shape.dp_rank_of_lane.astype(np.int32)
    ranks = np.array([[shape.rank(dp, op.pp_rank) for op in ops] for dp in range(shape.layout.dp_ranks)], np.int32)
    # One matrix at a time, transposed so that lanes follow each other.
    columns = [
        pl.Series("step", np.repeat(step_numbers[shape.step_of_lane], rows)),
        pl.Series("rank", np.tile(ranks.ravel(), shape.steps)),
        pl.Series("dp_rank", np.repeat(dp_rank, rows)),
        pl.Series("start", times.start[order].T.ravel()),
        pl.Series("duration", times.duration[order].T.ravel()),
    ]
    columns += op_columns[np.tile(np.arange(rows, dtype=np.uint32), lanes)].get_columns()
    return pl.DataFrame(columns)


def _without_missing(
    ops: pl.DataFrame, shape: JobShape, step_numbers: Sequence[int], causes: Sequence[InjectedCause]
) -> pl.DataFrame:
    """Drop the ops that were not recorded."""
    pp = shape.layout.pp
    worker = pl.col("dp_rank").cast(pl.Int64) * pp + pl.col("pp_rank")
    for cause in causes:
        if isinstance(cause, MissingRanks):
            first = (cause.dp_rank or 0) * pp + (cause.pp_rank or 0)
            workers = shape.layout.workers
            ops = ops.filter((worker - first) % workers >= cause.count)
            if ops.is_empty():
                raise SelectionError(
                    f"{cause.NAME}: count is {cause.count}; the job has {workers} workers, keep at least one"
                )
        elif isinstance(cause, MissingSteps):
            place = Worker(cause.dp_rank or 0, cause.pp_rank or 0)
            position = cause.position or 0
            missing = list(step_numbers[position : position + cause.count])
            ops = ops.filter(~((worker == place.dp_rank * pp + place.pp_rank) & pl.col("step").is_in(missing)))
            if ops.is_empty():
                raise SelectionError(f"{cause.NAME}: the job has one worker and {shape.steps} steps, keep at least one")
    return ops


def _metadata(spec: SynthSpec, shape: JobShape, causes: Sequence[InjectedCause]) -> Mapping[str, Any]:
    layout = shape.layout
    hosts = {
        str(shape.rank(dp_rank, pp_rank)): f"host-{shape.host(dp_rank, pp_rank):04d}"
        for dp_rank in range(layout.dp_ranks)
        for pp_rank in range(layout.pp)
    }
    return {
        "framework": _FRAMEWORK,
        "gpu_model": "H800",
        "hosts": hosts,
        "layers": list(spec.layers) if spec.layers else None,
        "schedule": str(spec.schedule),
        "microbatches": spec.microbatches,
        "overlap_dp": spec.overlap_dp,
        "seed": spec.seed,
        "noise": spec.noise,
        "labels": [cause.label() for cause in causes],
    }


def _job(name: str, layout: Layout, steps: int, seed: int, cause: str | None = None, **settings: Any) -> SynthSpec:
    causes = () if cause is None else (parse_cause(cause),)
    return SynthSpec(layout, steps=steps, seed=seed, causes=causes, name=name, **settings)


#: The jobs in `sample_traces/`, by the name of their file.
SAMPLES = {
    "healthy": _job("healthy", Layout(dp=4, pp=4), 12, 1),
    "slow_worker": _job("slow-worker", Layout(dp=4, pp=4), 12, 2, "slow-worker:dp=1,pp=2,factor=1.8"),
    "slow_last_stage": _job(
        "slow-last-stage",
        Layout(dp=2, pp=4, vpp=2),
        10,
        3,
        "slow-last-stage",
        schedule=Schedule.INTERLEAVED,
        overlap_dp=True,
        record_no_ops=True,
    ),
    "sequence_lengths": _job("sequence-lengths", Layout(dp=8, pp=2), 10, 4, "sequence-length-imbalance"),
    "python_gc": _job("python-gc", Layout(dp=8, pp=1), 40, 5, "python-gc"),
}
#: The jobs of `tracekit open` without a path: all of these, and three more causes.
DEMO = (
    *SAMPLES.values(),
    _job("late-data", Layout(dp=4, pp=4), 20, 6, "late-data-loading"),
    _job("slow-link", Layout(dp=4, pp=4), 20, 3, "slow-p2p-link"),
    _job("slow-steps", Layout(dp=4, pp=4), 20, 4, "slow-steps"),
)
