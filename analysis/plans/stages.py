"""What a stage takes and holds, for every stage and every run of layers that it could have.

In: a `PlanModel`, a schedule and a number of microbatches. Out: `Stages`, the cells [stage, first layer, end] of which
plans are made. A stage recomputes only where it must: recomputation never makes a step shorter. Buckets depend on
nothing but their stage, so that the best ones are part of the cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.plans.model import PlanModel
from tracekit.base.limits import check_time
from tracekit.trace.compute_order import Schedule

#: Memory is compared with this relative tolerance: sums in another order differ by rounding.
ROUNDING = 1e-9
_Bools = npt.NDArray[np.bool_]
#: Sizes that are tried at most.
_SIZES = 64
#: The default of DistributedDataParallel, MiB.
DEFAULT_MB = 25.0


class Stages(Struct, frozen=True, eq=False, dict=True):
    """The cells of one schedule and number of microbatches; `memory_gb`: the limit, None: none."""

    model: PlanModel
    schedule: Schedule
    microbatches: int
    memory_gb: float | None

    @property
    def mean_work_s(self) -> float:
        """What computes take in the mean of the stages, all as fast as the fastest, seconds: no plan takes less."""
        all_s = self.forwards_until[-1] + self.backwards_until[-1]
        return float(all_s * self.microbatches / self.model.stages)

    @property
    def samples(self) -> float:
        """Samples of a microbatch."""
        return self.model.samples / self.microbatches

    @property
    def transfer_s(self) -> float:
        """Seconds of a transfer between stages."""
        fixed, per_sample = self.model.transfer_s
        return fixed + per_sample * self.samples

    @cached_property
    def forwards_until(self) -> Floats:
        """Forward seconds of all layers before each one on the fastest stage, [layers + 1]."""
        return _until(self.model.of_layers("forward_s", self.samples) * self._slowness.min())

    @cached_property
    def backwards_until(self) -> Floats:
        """Backward seconds of all layers before each one, likewise and without recomputation, [layers + 1]."""
        return _until(self.model.of_layers("backward_s", self.samples) * self._slowness.min())

    @property
    def _slowness(self) -> Floats:
        return np.array(self.model.slowness or (1.0,) * self.model.stages)

    @property
    def _factor(self) -> Floats:
        """How many times as long as the fastest stage each stage takes, [stages]."""
        return np.asarray(self._slowness / self._slowness.min())

    @cached_property
    def allowed(self) -> _Bools:
        """The cells of the space, whatever their memory, [stages, layers + 1, layers + 1]."""
        layers, stages = len(self.model.layers), self.model.stages
        stage, first, end = np.ogrid[:stages, : layers + 1, : layers + 1]
        allowed = (first < end) & (first >= stage) & (end <= layers - (stages - 1 - stage))
        allowed &= ((stage > 0) | (first == 0)) & ((stage < stages - 1) | (end == layers))
        if self.model.space.split == "fixed":
            ends = np.cumsum(self.model.now.split)[:, None, None]
            allowed &= (end == ends) & (first == ends - np.array(self.model.now.split)[:, None, None])
        return allowed

    @cached_property
    def memory(self) -> Floats:
        """Memory without and with recomputation, GB, [2, stages, layers + 1, layers + 1]."""
        model, stages = self.model, self.model.stages
        held = np.full(stages, self.microbatches)
        if self.schedule is Schedule.ONE_F_ONE_B:
            held = np.minimum(held, stages - np.arange(stages))
        state, activations, boundary = (
            _between(_until(model.of_layers(name))) for name in ("state_gb", "activation_gb", "boundary_gb")
        )
        held_samples = (held * self.samples)[:, None, None]
        activation, largest = model.of_layers("activation_gb"), np.zeros_like(activations)
        for first in range(len(activation)):
            largest[first, first + 1 :] = np.maximum.accumulate(activation[first:])
        with_recompute = boundary * held_samples + largest * self.samples
        return np.stack([state + activations * held_samples, state + with_recompute])

    @cached_property
    def recompute(self) -> _Bools:
        """Whether the stage recomputes, [stages, layers + 1, layers + 1]."""
        if self.model.space.recompute == "fixed":
            fixed = np.array(self.model.now.recompute)[:, None, None]
            return np.broadcast_to(fixed, self.allowed.shape)
        return ~self._within(self.memory[0])

    def _within(self, memory: Floats) -> _Bools:
        if self.memory_gb is None or not self.model.knows_memory:
            return np.ones(memory.shape, np.bool_)
        return memory <= self.memory_gb * (1 + ROUNDING)

    @cached_property
    def possible(self) -> _Bools:
        """The cells of the space that fit into memory, [stages, layers + 1, layers + 1]."""
        return self.allowed & np.where(self.recompute, self._within(self.memory[1]), self._within(self.memory[0]))

    @cached_property
    def forward_s(self) -> Floats:
        """Seconds of a forward, [stages, layers + 1, layers + 1]."""
        return np.asarray(_between(self.forwards_until) * self._factor[:, None, None])

    @cached_property
    def backward_s(self) -> Floats:
        """Seconds of a backward with recomputation, [stages, layers + 1, layers + 1]."""
        plain = _between(self.backwards_until) * self._factor[:, None, None]
        return np.asarray(plain + np.where(self.recompute, self.forward_s, 0.0))

    @cached_property
    def tail_s(self) -> Floats:
        """From the start of the last backward to the end of the last bucket, [stages, layers + 1, layers + 1]."""
        reduce = self.model.reduce
        if self.model.replicas == 1:
            return self.backward_s
        if self.model.space.buckets == "one":
            mb = _between(self._mb_until)
            return np.asarray(self.backward_s + (reduce.fixed_s + (reduce.per_mb_s + reduce.copy_per_mb_s) * mb))
        if (of_stages := self._stated_buckets) is not None:
            tails, ends = np.full(self.allowed.shape, np.inf), np.cumsum([sum(buckets) for buckets in of_stages])
            for stage, (end, buckets) in enumerate(zip(ends.tolist(), of_stages, strict=True)):
                place = stage, end - sum(buckets), end
                tails[place] = self.tail_of(stage, end, buckets, bool(self.recompute[place]))
            return tails
        ends = np.flatnonzero(self.allowed.any(axis=(0, 1)))
        factors, of_stage = np.unique(self._factor, return_inverse=True)
        plain, recomputing = (
            np.stack([self._tails(ends, self._ready_until(factor, recompute)) for factor in factors])
            for recompute in (False, True)
        )
        return np.asarray(np.where(self.recompute, recomputing[of_stage], plain[of_stage]))

    @cached_property
    def _stated_buckets(self) -> tuple[tuple[int, ...], ...] | None:
        """Buckets of each stage that follow from no search; None if one is needed."""
        model, recompute = self.model, bool(self.recompute[0, 0, -1])
        if model.space.buckets == "fixed":
            return model.now.buckets
        if model.space.buckets != "size":
            return None
        gradients_mb = model.of_layers("gradient_mb").tolist()
        candidates = dict.fromkeys(buckets_of_size(gradients_mb, size, size) for size in sizes_of(gradients_mb))
        return (min(candidates, key=lambda buckets: self.tail_of(0, len(gradients_mb), buckets, recompute)),)

    def _ready_until(self, factor: float, recompute: bool) -> Floats:
        """When the gradients of all layers before each one are ready in the last backward, [layers + 1]."""
        return np.asarray((self.backwards_until + self.forwards_until * recompute) * factor)

    @cached_property
    def _reduced_until(self) -> Floats:
        """Seconds that the gradients of all layers before each one take beyond the fixed cost, [layers + 1]."""
        return _until(self.model.of_layers("gradient_mb") * self.model.reduce.per_mb_s)

    @cached_property
    def _mb_until(self) -> Floats:
        """The size of the gradients of all layers before each one, MB, [layers + 1]."""
        return _until(self.model.of_layers("gradient_mb"))

    def _tails(self, ends: npt.NDArray[np.int64], ready: Floats) -> Floats:
        """The shortest tails of the runs of layers with these ends, [layers + 1, layers + 1]; `ready`: `_ready_until`.

        A run's gradients are reduced by its last bucket, after the shortest tail of the layers behind that bucket.
        """
        after = np.full((len(ready),) * 2, np.inf)
        after[ends, ends] = 0.0
        for first in range(len(ready) - 2, -1, -1):
            check_time()
            took = np.maximum(after[first + 1 :, ends], ready[ends] - ready[first]) + self._cost(first)[:, None]
            after[first, ends] = np.where(first < ends, took.min(axis=0), after[first, ends])
        return after

    def _cost(self, first: int) -> Floats:
        """What the reduction of the layers from the first to before each later one takes, seconds."""
        until = self._reduced_until
        return np.asarray(self.model.reduce.fixed_s + until[first + 1 :] - until[first])

    def tail_of(self, stage: int, end: int, buckets: Sequence[int], recompute: bool) -> float:
        """The tail of the layers before an end on that stage, in these buckets, seconds."""
        ready, reduce = self._ready_until(self._factor[stage], recompute), self.model.reduce
        computed, overlapped_s, behind, work = 0.0, 0.0, end, 0.0  # seconds alone; of these, at the same time
        arrivals: list[float] = []  # seconds of service
        works: list[float] = []
        for count in buckets:
            behind -= count
            before, computed = computed, float(ready[end] - ready[behind])
            overlapped_s = min(overlapped_s + (computed - before) / reduce.compute_rate, work / reduce.reduce_rate)
            arrivals.append(overlapped_s * reduce.reduce_rate)
            works.append(float(self._cost(behind)[count - 1]))
            work += works[-1]
        later = np.maximum(served_until(arrivals, works, reduce.at_once) - arrivals[-1], 0.0)
        copies = -reduce.copy_per_mb_s * np.diff(self._mb_until[end - np.cumsum([0, *buckets])])
        copied = later + np.cumsum(copies[::-1])[::-1]
        return float(computed + overlapped_s * (1 - reduce.compute_rate) + copied.max())

    def best_buckets(self, stage: int, first: int, end: int, recompute: bool) -> tuple[int, ...]:
        """The buckets of the shortest tail of these layers on that stage, from the last layer to the first."""
        kind = self.model.space.buckets
        if kind == "one" or (self.model.replicas == 1 and kind != "fixed"):
            return (end - first,)
        if (of_stages := self._stated_buckets) is not None:
            return of_stages[stage]
        ready = self._ready_until(self._factor[stage], recompute)
        tails, buckets = self._tails(np.array([end]), ready)[:, end], []
        while first < end:
            took = np.maximum(tails[first + 1 :], ready[end] - ready[first]) + self._cost(first)
            size = len(took) - int(took[::-1].argmin())  # of equals, the longest bucket
            buckets.append(size)
            first += size
        return tuple(reversed(buckets))


def _until(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _between(until: Floats) -> Floats:
    """The sum of the values from the first to before the end, [first, end]; 0 if there is none between."""
    return np.maximum(until[None, :] - until[:, None], 0.0)


def buckets_of_size(gradients_mb: Sequence[float], size_mb: float, first_mb: float) -> tuple[int, ...]:
    """How many layers each bucket holds if it is closed once it has `size_mb`, the first one once it has `first_mb`.

    `gradients_mb`: of the layers, in order of the model; buckets begin with the last.
    """
    buckets, layers, held, limit = [], 0, 0.0, first_mb
    for gradient in reversed(gradients_mb):
        layers, held = layers + 1, held + gradient
        if held >= limit:
            buckets.append(layers)
            layers, held, limit = 0, 0.0, size_mb
    return (*buckets, layers) if layers else tuple(buckets)


def served_until(arrivals: Sequence[float], works: Sequence[float], at_once: int) -> Floats:
    """When each bucket is reduced, if those that arrived first, `at_once` of them, share the link, [buckets].

    All times are seconds of service, during which the link is never idle.
    """
    if at_once == 1:
        return np.cumsum(works)
    rest, waiting, clock = np.array(works), list(range(len(works))), 0.0
    until = np.zeros(len(works))
    while waiting:
        served = [bucket for bucket in waiting if arrivals[bucket] <= clock][:at_once] or waiting[:1]
        coming_s = min((arrivals[bucket] for bucket in waiting if arrivals[bucket] > clock), default=np.inf)
        first = served[int(rest[served].argmin())]
        lasts = float(rest[first]) * len(served)
        if clock + lasts > coming_s:
            rest[served] -= (coming_s - clock) / len(served)
            clock = coming_s
            continue
        rest[served] -= lasts / len(served)
        clock += lasts
        until[first] = clock
        waiting.remove(first)
    return until


def sizes_of(gradients_mb: Sequence[float]) -> list[float]:
    """Sizes of buckets that differ, MB, largest first: those of the last layers together, and of equal parts."""
    whole, least = max(sum(gradients_mb), 0.2), max(max(gradients_mb) / 8, 0.1)
    together = list(accumulate(reversed(gradients_mb)))[:_SIZES]
    sizes = {_rounded_down(size) for size in together if size >= least}
    sizes |= {float(f"{size:.3g}") for size in np.geomspace(least, whole, _SIZES)}
    return sorted(sizes | {DEFAULT_MB}, reverse=True)


def _rounded_down(size_mb: float) -> float:
    """Three digits: a little less closes the same buckets, a little more does not."""
    step = 10.0 ** (np.floor(np.log10(size_mb)) - 2)
    return float(f"{np.floor(size_mb / step) * step:.3g}")
