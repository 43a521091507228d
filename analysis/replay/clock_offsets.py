"""Offsets of clocks: what ties clocks together, one joint estimate from all ties, and its course over the trace.

In: a `DependencyGraph`. Out: `Ties`, what ends for several workers at once; offsets of all workers that fit them best;
`Courses`, the simplest course of each clock (steady, drifting, or stepped once) and the rest.

The estimate minimises the sum of all absolute misfits: of each member of a collective from the end of its group (also
unknown), and of each pair of neighbouring stages from the bounds of their link, inside which the misfit is 0. A sum of
absolute values is robust: the other ties outvote a few wrong ones (a slow network card, a slow link). Among solutions
of equal cost, the one closest to correct clocks wins.

Solved by the alternating direction method of multipliers. Its linear system is that of a grid, stages x DP ranks. It is
solved directly if no tie is missing, and otherwise in a few iterations, for any number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis import native
from tracekit.analysis.graph.dependency_graph import DependencyGraph
from tracekit.analysis.graph.op_grid import op_grid, transfer_grid
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA, MEDIAN_ERROR, median
from tracekit.trace.model import OpKind

#: Collectives over the DP ranks of a stage. They share a network card, so together they are one witness, with less
#: weight than others: a slow card looks like a clock that is ahead.
OF_DP_RANKS = (
    OpKind.PARAMS_ALL_GATHER,
    OpKind.GRADS_REDUCE_SCATTER,
    OpKind.SEPARATE_GRADS_ALL_REDUCE,
    OpKind.ALL_REDUCE,
)
OF_DP_RANKS_WEIGHT = 0.5
#: Look at this many ops of a kind per worker and step.
OPS_PER_STEP = 4
#: Cost of a second of offset relative to a second of misfit: decides only between equal solutions. Chosen.
PRIOR = 0.02
ITERATIONS = 600
#: Misfits shrink by this share of the largest one at first, and by `finest_s` at the end. Chosen.
COARSEST = 0.1
#: Iterations and tolerance of the linear steps.
CG_ITERATIONS, CG_TOLERANCE = 20, 1e-7
#: With up to this many misfits in a run, the linear step is a single matrix, each column solved to full precision.
MOST_IN_MATRIX, EXACT = 200, 1e-13
#: An effect must be this many of its standard errors large. Benchmark `clocks`.
ERRORS = 6.0
#: With this many runs, the scatter of a clock is estimated from its changes between runs. Chosen.
FEWEST_FOR_SCATTER = 5
#: A line takes this many runs; so many leave two on each side of a jump, because one late run is not a jump.
#: Definition.
FEWEST_FOR_LINE = 4
FEWEST_FOR_LONE = 5
#: Number of free parameters of a steady clock, of a line, and of a jump including its place.
STEADY, LINE, JUMP = 1, 2, 3


class Group(Struct, frozen=True, eq=False):
    """One kind of collective: when its members left it, seconds, [runs, stages, dp_ranks], nan for workers outside it.

    Times are relative to the median member of the group, which is all DP ranks of a stage or, with `all_stages`, the
    whole job. `weight`: weight of this kind relative to others. `took_s`: duration of the transfer, seconds.
    """

    left_s: Floats
    weight: float
    all_stages: bool
    took_s: float


class Ties(Struct, frozen=True, eq=False):
    """All ties of a job.

    `low`, `high`: bounds of the offset of stage s + 1 from stage s, seconds ahead, [runs, stages, dp_ranks], infinite
    if unbounded; the first stage follows the last. `ends`: offset of the first stage from the last, seconds ahead,
    [runs, dp_ranks], nan if nothing ties them. `link_took_s`: duration of a transfer between stages, seconds.

    A collective ends for all of its members at nearly the same moment, so a member that leaves late has a clock that is
    ahead, or a slow network card. A transfer ends on its receiver no earlier than on its sender, so the two directions
    of a link bound the offset between its ends from both sides, as in NTP.
    """

    groups: tuple[Group, ...]
    low: Floats
    high: Floats
    ends: Floats
    link_took_s: float

    @property
    def shape(self) -> tuple[int, int, int]:
        """Runs, stages, DP ranks."""
        runs, stages, dp_ranks = self.low.shape
        return runs, stages, dp_ranks

    def only(self, dp_indices: Ints) -> Ties:
        """The ties of these DP ranks only."""
        groups = tuple(replace(group, left_s=group.left_s[..., dp_indices]) for group in self.groups)
        low, high, ends = (values[..., dp_indices] for values in (self.low, self.high, self.ends))
        return Ties(groups, low, high, ends, self.link_took_s)

    def linked(self) -> Ints:
        """The lowest number of any worker that each worker is tied to, directly or through others, [stages, dp_ranks].

        Clocks of workers with one number can be compared.
        """
        _, stages, dp_ranks = self.shape
        groups = [(_seen(group.left_s), None if group.all_stages else 1) for group in self.groups]
        links = np.asarray(np.any(np.isfinite(self.low) | np.isfinite(self.high), axis=0))
        ends = _seen(self.ends)
        number = np.arange(stages * dp_ranks).reshape(stages, dp_ranks)
        while True:
            before = number
            for member, axis in groups:
                lowest = np.where(member, number, number.size).min(axis=axis, keepdims=True)
                number = np.where(member, np.minimum(number, lowest), number)
            for stage in range(stages):
                pair = [stage, (stage + 1) % stages]
                number[pair] = np.where(links[stage], number[pair].min(axis=0), number[pair])
            number[[0, -1]] = np.where(ends, number[[0, -1]].min(axis=0), number[[0, -1]])
            # If a member's number was lowered, lower all others that had the old number too.
            number = number.ravel()[number]
            if (number == before).all():
                return number


class TieSource(Struct, frozen=True, eq=False, dict=True):
    """The ends of the tied ops of a graph, to be aggregated over any runs of steps.

    `shape`: stages, DP ranks. `dp_kinds`, `clip`: collectives over the DP ranks of a stage, and over all workers.
    `embedding`: ends of the exchange of embedding gradients, [stages, ops, steps, dp_ranks]. `lag`: how much later each
    receive ends than its send, [slots, ops, steps, dp_ranks], and `took`: the duration of the transfer. Seconds.
    """

    shape: tuple[int, int]
    dp_kinds: Mapping[OpKind, _Tied]
    clip: _Tied | None
    embedding: Floats | None
    lag: Floats | None
    took: Floats | None

    @classmethod
    def of(cls, graph: DependencyGraph) -> TieSource:
        """Read them."""
        shape = (graph.layout.pp, len(graph.dp_ranks))
        tied = {kind: _Tied.of(graph, kind, (3,), OPS_PER_STEP) for kind in OF_DP_RANKS if graph.rendezvous_count}
        dp_kinds = {kind: of_kind for kind, of_kind in tied.items() if of_kind is not None}
        clip = _Tied.of(graph, OpKind.OPTIMIZER_CLIP_MAIN_GRAD, (0, 3), 1)
        embedding = op_grid(graph, (OpKind.EMBEDDING_GRADS_ALL_REDUCE,), most=OPS_PER_STEP)
        exchanged = None if embedding.empty or graph.layout.pp < 2 else embedding.ends(graph.blocks)
        transfers = transfer_grid(graph, most=OPS_PER_STEP)
        if graph.layout.pp < 2 or transfers.empty:
            return cls(shape, dp_kinds, clip, exchanged, None, None)
        lag = transfers.recvs.ends(graph.blocks) - transfers.sends.ends(graph.blocks)
        return cls(shape, dp_kinds, clip, exchanged, lag, transfers.gather([block.duration for block in graph.blocks]))

    @classmethod
    def joined(cls, parts: Sequence[TieSource], steps: Sequence[int]) -> TieSource:
        """The ties of several batches of so many steps, one after the other."""
        if len(parts) == 1:
            return parts[0]

        def grids(of_batches: Sequence[Floats | None]) -> Floats | None:
            with_ops = [batch for batch in of_batches if batch is not None]
            if not with_ops:
                return None
            slots, _, _, *more = with_ops[0].shape
            grid = np.full((slots, max(batch.shape[1] for batch in with_ops), sum(steps), *more), np.nan)
            for batch, last, count in zip(of_batches, np.cumsum(steps).tolist(), steps, strict=True):
                if batch is not None:
                    grid[:, : batch.shape[1], last - count : last] = batch
            return grid

        def tied(of_batches: Sequence[_Tied | None]) -> _Tied | None:
            left_s = grids([None if batch is None else batch.left_s for batch in of_batches])
            quickest_s = grids([None if batch is None else batch.quickest_s for batch in of_batches])
            return None if left_s is None or quickest_s is None else _Tied(left_s, quickest_s)

        of_kinds = {kind: tied([part.dp_kinds.get(kind) for part in parts]) for kind in OF_DP_RANKS}
        return cls(
            parts[0].shape,
            {kind: of_kind for kind, of_kind in of_kinds.items() if of_kind is not None},
            tied([part.clip for part in parts]),
            grids([part.embedding for part in parts]),
            grids([part.lag for part in parts]),
            grids([part.took for part in parts]),
        )

    @cached_property
    def _link_took_s(self) -> float:
        return 0.0 if self.took is None else float(np.nanmedian(self.took))

    def ties(self, runs: Sequence[Ints]) -> Ties:
        """The median ties of each of these runs of steps."""
        weight = OF_DP_RANKS_WEIGHT / max(len(self.dp_kinds), 1)
        groups = [Group(_by_run(tied.left_s, runs), weight, False, tied.took_s) for tied in self.dp_kinds.values()]
        if self.clip is not None:
            groups.append(Group(_by_run(self.clip.left_s, runs), 1.0, True, self.clip.took_s))
        stages, dp_ranks = self.shape
        low, high = np.full((2, len(runs), stages, dp_ranks), np.inf) * np.array([-1, 1])[:, None, None, None]
        if self.lag is not None:
            lag = _by_run(self.lag, runs)
            forward, backward = lag[:, ::2], lag[:, 1::2]
            low, high = np.fmin(-backward, forward), np.fmax(-backward, forward)
            # If only one direction was recorded, it bounds one side.
            low = np.where(np.isnan(backward), -np.inf, low)
            high = np.where(np.isnan(forward), np.inf, high)
        ends = np.full((len(runs), dp_ranks), np.nan)
        if self.embedding is not None:
            ends = _by_run(self.embedding[:1] - self.embedding[-1:], runs)[:, 0]
        return Ties(tuple(groups), low, high, ends, self._link_took_s)


class _Tied(Struct, frozen=True, eq=False):
    """Ops that end together: how much later than the median member each left, seconds, [slots, ops, steps, dp_ranks].

    `quickest_s`: the shortest duration of a member, without the last axes.
    """

    left_s: Floats
    quickest_s: Floats

    @classmethod
    def of(cls, graph: DependencyGraph, kind: OpKind, axes: tuple[int, ...], most: int) -> _Tied | None:
        """Ops of a kind, each joining the members along `axes`; None if there are none."""
        grid = op_grid(graph, (kind,), most=most)
        if grid.empty:
            return None
        duration = grid.gather([block.duration for block in graph.blocks])
        ends = grid.gather([block.start for block in graph.blocks]) + duration
        # The last to arrive did not wait: its duration is the shortest, which no clock changes.
        quickest = np.fmin.reduce(duration, axis=axes[-1])
        return cls(ends - np.expand_dims(median(ends, axes), axes), quickest)

    @property
    def took_s(self) -> float:
        """The usual duration of the transfer, seconds."""
        return float(np.nanmedian(self.quickest_s))


def _seen(values: Floats) -> Bools:
    """True where any run has a value."""
    return np.asarray(np.isfinite(values).any(axis=0))


def _by_run(values: Floats, runs: Sequence[Ints]) -> Floats:
    """Medians over the ops and steps of each run, [runs, slots, dp_ranks]. `values`: [slots, ops, steps, dp_ranks]."""
    if len(runs) == values.shape[2]:
        return median(values, (1,)).transpose(1, 0, 2)
    return np.stack([median(values[:, :, run], (1, 2)) for run in runs])


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
        over_stages = sum(group.all_stages for group in ties.groups)
        identity = np.eye(stages)
        between = (np.roll(identity, 1, axis=1) - identity)[self._linked.any(axis=1)]  # offset[s + 1] - offset[s]
        ends = identity[:1] - identity[-1:] if self._joined.any() else identity[:0]
        chain = between.T @ between + ends.T @ ends + identity
        self._of_deviation = np.linalg.inv(chain + len(ties.groups) * identity)
        self._of_mean = np.linalg.inv(chain + over_stages * (identity - 1 / stages))
        links = self._linked[self._linked.any(axis=1)]
        all_links = bool(links.all() and np.ptp(self._joined) == 0)
        self._complete = all_links and all(group.complete for group in self._groups)

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

    def __init__(self, present: Bools, axes: tuple[int, ...]) -> None:
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
        centred = np.asarray(values - mean)
        return centred if self.complete else centred * self._present


class Courses(Struct, frozen=True, eq=False):
    """The courses of clocks, [clocks] each.

    `ahead_s`: seconds ahead in each run, [runs, clocks]. `drift`: seconds per second. `jump_s`, `jump_run`: the step of
    a clock, seconds ahead, and the first run after that, -1 if it was not. `error_s`: standard error of the level,
    seconds. `irregular_s`: movement beyond the scatter that follows none of the courses, seconds on average.
    """

    ahead_s: Floats
    drift: Floats
    jump_s: Floats
    jump_run: Ints
    error_s: Floats
    irregular_s: Floats


def fit_courses(samples: Floats, times: Floats, scatter_s: Floats, floor_s: float) -> Courses:
    """The course of each clock. `samples`: seconds ahead, [runs, clocks]. `times`: of the runs, seconds, ascending.

    `scatter_s`: their usual scatter, [clocks], used if there are too few runs to estimate it. Changes below `floor_s`
    do not count.
    """
    runs = len(samples)
    spread = _scatter(samples) if runs >= FEWEST_FOR_SCATTER else scatter_s
    level = np.median(samples, axis=0)
    steady = np.broadcast_to(level, samples.shape)
    slope, line = _line(samples, times)
    jump_s, jump_run, jumped = _jump(samples)
    # Negligible differences do not decide.
    least = np.maximum(spread / 2, floor_s / 10)

    def score(fitted: Floats, free: int) -> Floats:
        """The Bayesian information criterion, for misfits with a Laplace distribution."""
        misfit = np.abs(samples - fitted).mean(axis=0)
        return np.asarray(2 * runs * np.log(np.maximum(misfit, least)) + free * np.log(max(runs, 2)))

    error = MEDIAN_ERROR * spread / np.sqrt(runs)
    span = np.abs(slope) * (times[-1] - times[0])
    # A slope over the whole trace has sqrt(12) times the standard error of a level.
    drifts = (span > np.maximum(floor_s, ERRORS * np.sqrt(12) * error)) & (runs >= FEWEST_FOR_LINE)
    sides = np.sqrt(1 / np.maximum(jump_run, 1) + 1 / np.maximum(runs - jump_run, 1))
    jumps = np.abs(jump_s) > np.maximum(floor_s, ERRORS * MEDIAN_ERROR * spread * sides)
    scores = np.stack(
        [
            score(steady, STEADY),
            np.where(drifts, score(line, LINE), np.inf),
            np.where(jumps, score(jumped, JUMP), np.inf),
        ]
    )
    best = scores.argmin(axis=0)
    ahead = np.where(best == 1, line, np.where(best == 2, jumped, steady))
    return Courses(
        ahead_s=ahead,
        drift=np.where(best == 1, slope, 0.0),
        jump_s=np.where(best == 2, jump_s, 0.0),
        jump_run=np.where(best == 2, jump_run, -1),
        error_s=error,
        irregular_s=_irregular(samples - ahead, spread),
    )


def scatter(samples: Floats) -> float:
    """The spread of single samples around their course, for the median clock, seconds; `samples`: [runs, ...]."""
    if len(samples) < 2:
        return 0.0
    changes = _changes(samples)
    return float(MAD_TO_SIGMA * median(changes, tuple(range(changes.ndim))) / np.sqrt(2))


def _scatter(samples: Floats) -> Floats:
    """The spread of single samples around their course, for each clock, [clocks]."""
    return np.asarray(MAD_TO_SIGMA * median(_changes(samples), (0,)) / np.sqrt(2))


def _changes(samples: Floats) -> Floats:
    """Changes of samples from run to run, beyond a drift, [runs - 1, ...]."""
    changes = np.diff(samples, axis=0)
    return np.abs(changes - median(changes, (0,)))


def _line(samples: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Slope, [clocks], and values, [runs, clocks], of the line through the medians of all pairs (Theil-Sen)."""
    before, after = np.triu_indices(len(samples), 1)
    if not len(before):
        return np.zeros(samples.shape[1]), samples
    slope = np.median((samples[after] - samples[before]) / (times[after] - times[before])[:, None], axis=0)
    rising = slope * times[:, None]
    return slope, rising + np.median(samples - rising, axis=0)


def _jump(samples: Floats) -> tuple[Floats, Ints, Floats]:
    """Size and place of the best jump, [clocks], and its values, [runs, clocks]."""
    runs, clocks = samples.shape
    size, place = np.zeros(clocks), np.zeros(clocks, np.int64)
    best, fitted = np.full(clocks, np.inf), samples.copy()
    margin = 2 if runs >= FEWEST_FOR_LONE else 1
    for run in range(margin, runs - margin + 1):
        levels = [np.median(samples[:run], axis=0), np.median(samples[run:], axis=0)]
        values = np.repeat(levels, [run, runs - run], axis=0)
        cost = np.abs(samples - values).sum(axis=0)
        better = cost < best
        best = np.where(better, cost, best)
        size, place = np.where(better, levels[1] - levels[0], size), np.where(better, run, place)
        fitted = np.where(better, values, fitted)
    return size, place, fitted


def _irregular(residual: Floats, scatter: Floats) -> Floats:
    """The mean size, [clocks], of what remains beyond the scatter for more than one run at a time."""
    if len(residual) >= 3:
        inner = np.median(np.stack([residual[:-2], residual[1:-1], residual[2:]]), axis=0)
        residual = np.concatenate([inner[:1], inner, inner[-1:]])
    return np.asarray(np.maximum(np.abs(residual) - ERRORS * scatter, 0.0).mean(axis=0))
