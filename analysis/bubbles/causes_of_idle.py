"""What the idle time of a pipeline is due to.

In: a `RecordedPipeline`. Out: seconds of idle time for each cause, means over its lanes. The duration of each compute
is the mean of its kind x a factor of its stage x one of its worker x the rest, jitter. Each factor is a switch, like
the time of transfers and the dependencies between stages; Shapley's value divides the idle time among them.
"""

from __future__ import annotations

from itertools import product
from math import factorial

import numpy as np
from msgspec import Struct

from tracekit.analysis.bubbles.recorded import RecordedPipeline
from tracekit.analysis.numeric.arrays import Floats
from tracekit.report.bubbles import CauseOfIdle

#: What can be switched off; what all of them leave unexplained is the host's.
SWITCHES: tuple[CauseOfIdle, ...] = ("transfers", "jitter", "workers", "stages", "dependency")


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
    """Seconds of idle time a lane that each switch causes; their sum is what a replay without launch delays has."""
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
    dependent = [order.windows(durations, order.cell, transfers).mean() for transfers in (None, recorded.transfer)]
    return np.array([[free, one] for one in dependent])


def _shapley(times: Floats) -> list[float]:
    """Each switch's mean effect over all orders of switching on; `times`: [2, 2, ...], an axis for each switch."""
    count = times.ndim
    effects = []
    for switch in range(count):
        effect = np.take(times, 1, axis=switch) - np.take(times, 0, axis=switch)
        on = np.indices(effect.shape).sum(axis=0)
        orders = [factorial(others) * factorial(count - 1 - others) for others in range(count)]
        effects.append(float((effect * np.array(orders)[on]).sum() / factorial(count)))
    return effects


def _ratio(over: Floats, under: Floats) -> Floats:
    """Return over / under, 1 where both are nothing."""
    return np.divide(over, under, out=np.ones(np.broadcast_shapes(over.shape, under.shape)), where=under > 0)


def inverse(factor: Floats) -> Floats:
    """Return 1 / factor, 0 where it is 0."""
    return np.divide(1.0, factor, out=np.zeros_like(factor), where=factor > 0)
