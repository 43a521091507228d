"""One joint estimate of all clocks from all ties.

In: `Ties`. Out: offsets of all workers that fit them best.

Minimises the sum of all absolute misfits: of each member of a collective from the end of its group (also unknown), and
of each pair of neighbouring stages from the bounds of their link, inside which the misfit is 0. A sum of absolute
values is robust: the other ties outvote a few wrong ones (a slow network card, a slow link). Among solutions of equal
cost, the one closest to correct clocks wins.

Solved by the alternating direction method of multipliers. Its linear system is that of a grid, stages x DP ranks. It is
solved directly if no tie is missing, and otherwise in a few iterations, for any number of workers.
"""

from __future__ import annotations

from itertools import accumulate, groupby, pairwise

import numpy as np

from tracekit.analysis import native
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.clocks.ties import Ties

#: Cost of a second of offset relative to a second of misfit: decides only between equal solutions.
PRIOR = 0.02
ITERATIONS = 600
#: Misfits shrink by this share of the largest one at first, and by `finest_s` at the end.
COARSEST = 0.1
#: Iterations and tolerance of the linear steps.
CG_ITERATIONS, CG_TOLERANCE = 20, 1e-7
#: With up to this many misfits in a run, the linear step is a single matrix, each column solved to full precision.
MOST_IN_MATRIX, EXACT = 200, 1e-13


class _Term:
    """A set of misfits in the method. `weight`: the weight of each. `low`, `high`: bounds between which the misfit is
    0.

    `target`: what the linear step must come close to, the current copy minus its multiplier.
    """

    def __init__(self, weight: float, low: Floats, high: Floats) -> None:
        self.weight, self.low, self.high = weight, low, high
        self._flat_low, self._flat_high = low.ravel(), high.ravel()
        self.target, self._multiplier = np.zeros(low.shape), np.zeros(low.size)
        self._flat_target = self.target.ravel()  # a view

    def follow(self, value: Floats, threshold: float, following: float) -> None:
        """Move the copy from the value towards the bounds. `threshold`: of this step; `following`: of the next."""
        native.proximal_step(
            value.ravel(), self._flat_low, self._flat_high, self.weight * threshold, following / threshold,
            self._multiplier, self._flat_target,
        )  # fmt: skip


def estimate_offsets(ties: Ties, finest_s: float) -> Floats:
    """Offset of each clock, seconds ahead, [runs, stages, dp_ranks]. `finest_s`: precision of the result, seconds."""
    zero = np.zeros(ties.shape)
    prior = _Term(PRIOR, zero, zero)
    terms = [
        *(_Term(group.weight, *_bounds(group.left_s)) for group in ties.groups),
        _Term(1.0, np.ascontiguousarray(ties.low), np.ascontiguousarray(ties.high)),
        _Term(1.0, *_bounds(ties.ends)),
        prior,
    ]
    few = sum(term.target[0].size for term in terms) <= MOST_IN_MATRIX
    system = _Matrix(ties, [term.target.shape for term in terms]) if few else _System(ties, ties.shape[0])
    if few:
        terms = _merged(terms)
    thresholds = np.geomspace(max(COARSEST * _largest(ties), finest_s), finest_s, ITERATIONS)
    for threshold, following in zip(thresholds, np.append(thresholds[1:], finest_s), strict=True):
        values = system.values([term.target for term in terms])
        for term, value in zip(terms, values, strict=True):
            term.follow(value, threshold, following)
    return values[-1].reshape(ties.shape)


def _merged(terms: list[_Term]) -> list[_Term]:
    """Neighbouring terms of the same weight as one, [runs, misfits]: fewer operations on small arrays."""
    merged = []
    for weight, alike in groupby(terms, key=lambda term: term.weight):
        bounds = [(term.low.reshape(len(term.low), -1), term.high.reshape(len(term.high), -1)) for term in alike]
        merged.append(_Term(weight, *(np.concatenate(bound, axis=1) for bound in zip(*bounds, strict=True))))
    return merged


def _bounds(values: Floats) -> tuple[Floats, Floats]:
    """Both bounds of a tie that demands one value; infinite if it is nan."""
    missing = np.isnan(values)
    return np.where(missing, -np.inf, values), np.where(missing, np.inf, values)


def _largest(ties: Ties) -> float:
    """The largest misfit if all clocks were correct."""
    outside = np.maximum(np.maximum(ties.low, 0.0), np.maximum(-ties.high, 0.0))
    parts = [np.abs(group.left_s) for group in ties.groups] + [outside, np.abs(ties.ends)]
    return max(float(np.nanmax(part, initial=0.0)) for part in parts)


class _System:
    """The linear step: least squares of all targets, over the offsets and the ends of the groups.

    Targets and values are those of the terms in their order: the groups, the links, the ends of the pipeline, the
    prior, each [runs, ...]. Runs are independent of each other.

    Conjugate gradients. The preconditioner is the same system without gaps, which separates into the mean over DP ranks
    and the deviations from it: two small matrices over stages. If no worker lacks a tie, that is the solution.
    """

    def __init__(self, ties: Ties, runs: int, iterations: int = CG_ITERATIONS, tolerance: float = CG_TOLERANCE) -> None:
        _, stages, dp_ranks = ties.shape
        self._iterations, self._tolerance = iterations, tolerance
        self._groups = [
            _Members(np.asarray(np.any(np.isfinite(group.left_s), axis=0)), (1, 2) if group.all_stages else (2,))
            for group in ties.groups
        ]
        self._linked: Floats = np.asarray(np.any(np.isfinite(ties.low) | np.isfinite(ties.high), axis=0), np.float64)
        self._joined = (~np.isnan(ties.ends).all(axis=0)).astype(np.float64)
        self._offsets = np.zeros((runs, stages, dp_ranks))
        self._after, self._before = np.roll(np.arange(stages), -1), np.roll(np.arange(stages), 1)
        wide = sum(group.all_stages for group in ties.groups)
        identity = np.eye(stages)
        between = (np.roll(identity, 1, axis=1) - identity)[self._linked.any(axis=1)]  # offset[s + 1] - offset[s]
        ends = identity[:1] - identity[-1:] if self._joined.any() else identity[:0]
        chain = between.T @ between + ends.T @ ends + identity
        self._of_deviation = np.linalg.inv(chain + len(ties.groups) * identity)
        self._of_mean = np.linalg.inv(chain + wide * (identity - 1 / stages))
        links = self._linked[self._linked.any(axis=1)]
        self._complete = bool(links.all() and np.ptp(self._joined) == 0) and all(one.complete for one in self._groups)

    def values(self, targets: list[Floats]) -> list[Floats]:
        """The values closest to the targets; the last one is the offsets."""
        *groups, links, ends, prior = targets
        right = prior + self._along(links * self._linked) + self._across(ends * self._joined)
        means = [members.mean(target) for members, target in zip(self._groups, groups, strict=True)]
        for members, target, mean in zip(self._groups, groups, means, strict=True):
            right = right + members.centred(target, mean)
        offsets = self._preconditioned(right) if self._complete else self._conjugate_gradients(right)
        # The negative end of a group is the mean of its targets minus that of its members' offsets.
        apart = [offsets + (mean - members.mean(offsets)) for members, mean in zip(self._groups, means, strict=True)]
        return [*apart, self._steps(offsets), offsets[:, 0] - offsets[:, -1], offsets]

    def _steps(self, offsets: Floats) -> Floats:
        """Offset of the next stage's clock from each one, including from the last stage to the first."""
        return np.asarray(offsets[:, self._after] - offsets)

    def _conjugate_gradients(self, right: Floats) -> Floats:
        """Continue from the last solution."""
        residual = right - self._applied(self._offsets)
        enough = self._tolerance * np.sqrt(np.vdot(right, right))
        step = self._preconditioned(residual)
        towards, weight = step, np.vdot(residual, step)
        for _ in range(self._iterations):
            if weight <= 0 or np.sqrt(np.vdot(residual, residual)) <= enough:
                break
            image = self._applied(towards)
            length = weight / np.vdot(towards, image)
            self._offsets = self._offsets + length * towards
            residual = residual - length * image
            step = self._preconditioned(residual)
            before, weight = weight, np.vdot(residual, step)
            towards = step + weight / before * towards
        return self._offsets

    def _applied(self, offsets: Floats) -> Floats:
        value = offsets + self._along(self._steps(offsets) * self._linked)
        value = value + self._across((offsets[:, 0] - offsets[:, -1]) * self._joined)
        for members in self._groups:
            value = value + members.centred(offsets, members.mean(offsets))
        return value

    def _preconditioned(self, value: Floats) -> Floats:
        mean = value.mean(axis=2, keepdims=True)
        return np.asarray(self._of_mean @ mean + self._of_deviation @ (value - mean))

    def _along(self, links: Floats) -> Floats:
        """The transpose of the differences between neighbouring stages."""
        return np.asarray(links[:, self._before] - links)

    def _across(self, ends: Floats) -> Floats:
        """The transpose of the difference between the first stage and the last."""
        value = np.zeros_like(self._offsets)
        value[:, 0] += ends
        value[:, -1] -= ends
        return value


class _Matrix:
    """The same linear step as one matrix, faster than many operations on small arrays, for `_merged` terms.

    `shapes`: of the terms that are merged.
    """

    def __init__(self, ties: Ties, shapes: list[tuple[int, ...]]) -> None:
        ends = [0, *accumulate(int(np.prod(shape[1:])) for shape in shapes)]
        units = np.eye(ends[-1])  # one run per unit vector
        system = _System(ties, len(units), len(units), EXACT)
        values = system.values(
            [units[:, slice(*part)].reshape(-1, *shape[1:]) for part, shape in zip(pairwise(ends), shapes, strict=True)]
        )
        self._matrix = np.concatenate([value.reshape(len(units), -1) for value in values], axis=1)

    def values(self, targets: list[Floats]) -> list[Floats]:
        """Like `_System.values`."""
        values = np.concatenate(targets, axis=1) @ self._matrix
        return [values[:, slice(*part)] for part in pairwise([0, *accumulate(target.shape[1] for target in targets)])]


class _Members:
    """Means over the members of groups. `present`: [stages, dp_ranks]. `axes`: the axes that a group spans.

    `complete`: every worker is a member.
    """

    def __init__(self, present: np.ndarray, axes: tuple[int, ...]) -> None:
        self.complete = bool(present.all())
        self._present = present.astype(np.float64)
        self._axes = axes
        self._count = np.maximum(self._present[None].sum(axis=axes, keepdims=True), 1.0)

    def mean(self, values: Floats) -> Floats:
        """The mean over the members of each group."""
        of_members = values if self.complete else values * self._present
        return np.asarray(np.add.reduce(of_members, axis=self._axes, keepdims=True) / self._count)

    def centred(self, values: Floats, mean: Floats) -> Floats:
        """Values minus the mean of their group; 0 for workers that are not members."""
        less = np.asarray(values - mean)
        return less if self.complete else less * self._present
