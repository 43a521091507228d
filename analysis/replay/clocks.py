"""How far each worker's clock is off, and the job with its clocks set right.

In: a `DependencyGraph` as recorded. Out: `Clocks`, and the graph without the offsets. A wrong clock makes transfers
look long and workers late, so this comes before anything is measured.

What ties clocks together are ops that end for several workers at once: collectives over all workers, over the DP ranks
of a stage, and transfers between stages. Each kind of tie yields an estimate of its own, and a worker's offset is the
smallest of them: a wrong clock shows in everything a worker takes part in, a slow network card or link only in some of
it. A transfer ends on its receiver no earlier than on its sender, so the two directions of a link bound the offset
between its ends from both sides, as in NTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.graph.op_grid import OpGrid, op_grid, transfer_grid
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, lower_median, median, nan_mean
from tracekit.model import OpKind

#: Collectives that all members leave together, over the DP ranks of a stage.
DP_TIES = (
    OpKind.OPTIMIZER_CLIP_MAIN_GRAD,
    OpKind.PARAMS_ALL_GATHER,
    OpKind.GRADS_REDUCE_SCATTER,
    OpKind.SEPARATE_GRADS_ALL_REDUCE,
    OpKind.ALL_REDUCE,
)
#: How many ops of a kind are looked at per worker and step.
OPS_PER_STEP = 4
#: An offset must be this many of its standard errors large, and have one sign in this share of the samples.
OFFSET_ERRORS = 6.0
STEADY_SHARE = 0.8
#: Estimates of one offset agree when they are no more of their standard errors apart than this.
AGREEMENT_ERRORS = 5.0
#: A median of n values scatters by this much x their spread / sqrt(n).
MEDIAN_ERROR = 1.2533
#: Offsets below this share of the step change no answer; nor do those below the resolution of the recordings, seconds.
SMALLEST_SHARE = 0.001
RESOLUTION_S = 20e-6
#: With fewer steps than this a worker is compared with how far the others scatter, not with itself.
FEWEST_STEPS = 3
#: Clocks drift: offsets are measured in up to this many runs of steps, each of at least so many steps.
RUNS = 8
STEPS_PER_RUN = 2
FEWEST_RUNS = 4


@dataclass(frozen=True, slots=True)
class Clocks:
    """By how much the clocks of the workers were off. Arrays are [stages, dp_ranks].

    `offset_s`: seconds a clock is ahead of most others, the mean over the trace; 0 where nothing stands out. `drift`:
    seconds the offset grows in a second. `error_s`: standard error of the offset, nan for a worker that no op ties to
    another. `dp_ranks_tied`, `stages_tied`: whether any op ends at once on several DP ranks (stages), so that their
    clocks can be compared.
    """

    offset_s: Floats
    drift: Floats
    error_s: Floats
    dp_ranks_tied: bool
    stages_tied: bool

    @property
    def any_off(self) -> bool:
        """True where a clock is off."""
        return bool((self.offset_s != 0).any() or (self.drift != 0).any())

    @classmethod
    def right(cls, stages: int, dp_ranks: int) -> Clocks:
        """Clocks that nobody compared."""
        zero = np.zeros((stages, dp_ranks))
        return cls(zero, zero, np.full_like(zero, np.nan), dp_ranks_tied=False, stages_tied=False)


def measure_clocks(graph: DependencyGraph, step_starts: Mapping[int, float]) -> Clocks:
    """Compare the clocks of all workers. `step_starts`: seconds at which each step began, as far as known."""
    stages, dp_ranks = graph.layout.pp, len(graph.dp_ranks)
    if stages * dp_ranks < 2:
        return Clocks.right(stages, dp_ranks)
    ties = list(_dp_ties(graph)) if dp_ranks > 1 else []
    links = _link_bounds(graph)
    if not ties and links is None:
        return Clocks.right(stages, dp_ranks)
    within = _agreed(ties) if ties else np.zeros((len(graph.steps), stages, dp_ranks))
    if ties and links is not None:
        within = _confirmed(within, links)
    between = _between_stages(graph, within, links, lanes_tied=bool(ties))
    samples = within + between
    times = _step_times(graph, step_starts)
    return _settled(
        samples - _reference(graph, samples)[:, None, None],
        times,
        floor_s=max(RESOLUTION_S, SMALLEST_SHARE * _step_length_s(graph)),
        dp_ranks_tied=bool(ties),
        stages_tied=links is not None or _clip_ties_stages(graph),
    )


def with_clocks_set(graph: DependencyGraph, clocks: Clocks, step_starts: Mapping[int, float]) -> DependencyGraph:
    """The graph with the offsets taken off every recorded start."""
    dp_ranks = np.array(graph.dp_ranks)
    times = _step_times(graph, step_starts)
    since = times - times.mean()

    def shifted(block: Block) -> Block:
        dp_index = np.searchsorted(dp_ranks, block.dp_rank)
        stage = block.template.pp_rank[:, None]
        offset = clocks.offset_s[stage, dp_index]
        if (clocks.drift != 0).any():
            offset = offset + clocks.drift[stage, dp_index] * since[block.step]
        return replace(block, start=block.start - offset)

    return replace(graph, blocks=tuple(shifted(block) for block in graph.blocks))


def _ends(graph: DependencyGraph, grid: OpGrid) -> Floats:
    """When the ops of a grid ended, seconds, in the grid's shape."""
    starts = grid.gather([block.start for block in graph.blocks])
    return starts + grid.gather([block.duration for block in graph.blocks])


def _dp_ties(graph: DependencyGraph) -> Iterator[Floats]:
    """How late each worker leaves the collectives of its stage, per kind: seconds, [steps, stages, dp_ranks]."""
    if not graph.joins:
        return
    for kind in DP_TIES:
        grid = op_grid(graph, (kind,), most=OPS_PER_STEP)
        if grid.empty:
            continue
        ends = _ends(graph, grid)
        # Compared with the mean of its group in each step, and with the middle worker of a run of steps: a median of
        # the few members of a group in one step would hide an offset behind their noise.
        late = median(ends - nan_mean(ends, (3,))[..., None], (1,)).transpose(1, 0, 2)
        for run in _runs(len(late)):
            late[run] -= median(median(late[run], (0,)), (1,))[None, :, None]
        yield late


def _agreed(ties: Sequence[Floats]) -> Floats:
    """What all ties of a worker agree on; 0 where they contradict each other. `ties`: [steps, ...] each, one shape.

    The steadiest of the estimates where the others lie within their errors, else the smallest.
    """
    late = np.stack(ties)  # [ties, steps, ...]
    usual = np.asarray(median(late, (1,)))
    known = np.isfinite(usual)
    error = MEDIAN_ERROR * MAD_TO_SIGMA * median(np.abs(late - usual[:, None]), (1,)) / np.sqrt(late.shape[1])
    # What an estimate is relative to, the middle worker, has an error, too.
    of_middle = np.asarray(median(error, tuple(range(1, error.ndim)))).reshape(-1, *[1] * (error.ndim - 1))
    error = np.where(known, np.hypot(error, np.nan_to_num(of_middle)), np.inf)
    steadiest = np.asarray(error.argmin(axis=0))[None]
    apart = np.abs(usual - np.take_along_axis(usual, steadiest, axis=0))
    near = ~known | (apart <= AGREEMENT_ERRORS * np.hypot(error, np.take_along_axis(error, steadiest, axis=0)))
    smallest = np.asarray(np.where(known, np.abs(usual), np.inf).argmin(axis=0))[None]
    chosen = np.where(np.asarray(near.all(axis=0))[None], steadiest, smallest)
    picked = np.take_along_axis(late, chosen[:, None], axis=0)[0]
    signs = np.where(known & ~near, np.sign(usual), np.sign(np.take_along_axis(usual, chosen, axis=0)))
    contradict = np.asarray((signs > 0).any(axis=0) & (signs < 0).any(axis=0))
    # A worker that lacks the op in some steps is taken to be as far off there as in the others.
    level = np.nan_to_num(np.take_along_axis(usual, chosen, axis=0))
    agreed: Floats = np.where(contradict[None], 0.0, np.where(np.isfinite(picked), picked, level))
    return agreed


def _link_bounds(graph: DependencyGraph) -> tuple[Floats, Floats] | None:
    """Bounds of how far stage s + 1 is ahead of stage s, seconds, [steps, stages - 1, dp_ranks] each."""
    stages = graph.layout.pp
    grid = transfer_grid(graph, most=OPS_PER_STEP)
    if stages < 2 or grid.empty:
        return None
    lag = _ends(graph, grid.recvs) - _ends(graph, grid.sends)
    lag = median(lag, (1,)).transpose(1, 0, 2)[:, : 2 * (stages - 1)]
    forward, backward = lag[:, ::2], lag[:, 1::2]
    return np.fmin(-backward, forward), np.fmax(-backward, forward)


def _steps_along(links: tuple[Floats, Floats]) -> Floats:
    """How far each stage is ahead of the one before, no more than the bounds demand: [steps, stages - 1, ...]."""
    ahead = np.clip(0.0, *links)
    return np.where(np.isfinite(ahead), ahead, 0.0)


def _cumulated(differences: Floats) -> Floats:
    """Values from their differences along axis 1, the first 0."""
    return np.concatenate([np.zeros_like(differences[:, :1]), np.cumsum(differences, axis=1)], axis=1)


def _confirmed(within: Floats, links: tuple[Floats, Floats]) -> Floats:
    """Offsets within a stage as far as the pipeline's links see them, too; whole DP ranks, which links cannot see.

    A slow network card can delay all collectives of one worker alike. [steps, stages, dp_ranks].
    """
    along = _steps_along(links)
    along = along - np.asarray(median(along, (2,)))[..., None]
    single = _cumulated(_agreed([np.diff(within, axis=1), along]))
    whole = _agreed(list((within - single).transpose(1, 0, 2)))
    return single + whole[:, None]


def _between_stages(
    graph: DependencyGraph, within: Floats, links: tuple[Floats, Floats] | None, *, lanes_tied: bool
) -> Floats:
    """How far the clocks of each stage are ahead of those of the first, seconds, [steps, stages, dp_ranks or 1].

    Of the pipeline's links, and of gradient clipping where all stages do it, the smaller estimate per stage. Where
    nothing ties the DP ranks, each has a chain of its own.
    """
    estimates = []
    if links is not None:
        skew = np.diff(within, axis=1)
        low, high = links[0] - skew, links[1] - skew
        if lanes_tied:
            low, high = median(low, (2,))[..., None], median(high, (2,))[..., None]
        estimates.append(_cumulated(_steps_along((low, high))))
    if lanes_tied and _clip_ties_stages(graph):
        ends = _ends(graph, op_grid(graph, (OpKind.OPTIMIZER_CLIP_MAIN_GRAD,), most=1))[:, 0].transpose(1, 0, 2)
        estimates.append(median(ends - within, (2,))[..., None])
    if not estimates:
        return np.zeros((len(within), 1, 1))
    return _agreed([one - lower_median(one, axis=1)[:, None] for one in estimates])


def _clip_ties_stages(graph: DependencyGraph) -> bool:
    """True where gradient clipping joins all stages."""
    grid = op_grid(graph, (OpKind.OPTIMIZER_CLIP_MAIN_GRAD,), most=1)
    return graph.layout.pp > 1 and len({place.slot for place in grid.places}) == graph.layout.pp


def _reference(graph: DependencyGraph, samples: Floats) -> Floats:
    """What counts as the right time in each step, [steps]: that of the middle worker.

    Of an even number of workers there are two in the middle; right is the one with which steps begin closer to zero.
    """
    usual = median(samples, (0,)).ravel()
    order = np.argsort(usual, kind="stable")
    middle = {order[(len(order) - 1) // 2], order[len(order) // 2]}
    flat = samples.reshape(len(samples), -1)
    firsts = _first_starts(graph).reshape(len(samples), -1)

    def begins_s(worker: int) -> float:
        return abs(float(np.nanmedian(np.nanmin(firsts - usual + usual[worker], axis=1))))

    return flat[:, min(middle, key=begins_s)]


def _first_starts(graph: DependencyGraph) -> Floats:
    """When each worker's first op of each step starts, [steps, stages, dp_ranks]; nan where it has none."""
    dp_ranks = np.array(graph.dp_ranks)
    first = np.full((len(graph.steps), graph.layout.pp, len(dp_ranks)), np.nan)
    for block in graph.blocks:
        dp_index = np.searchsorted(dp_ranks, block.dp_rank)
        for stage in range(graph.layout.pp):
            rows = np.flatnonzero((block.template.pp_rank == stage) & (block.template.seq == 0))
            first[block.step, stage, dp_index] = block.start[rows].min(axis=0)
    return first


def _step_times(graph: DependencyGraph, step_starts: Mapping[int, float]) -> Floats:
    """When each step began, seconds: as recorded, else as if all steps of the job took as long as these."""
    known = [step_starts.get(int(step)) for step in graph.steps]
    starts = np.array([np.nan if start is None else start for start in known])
    if np.isfinite(starts).all() and (np.diff(starts) > 0).all():
        return np.asarray(starts - starts[0], np.float64)
    return np.asarray((graph.steps - graph.steps[0]) * _step_length_s(graph), np.float64)


def _step_length_s(graph: DependencyGraph) -> float:
    """About how long a step takes, seconds: to the latest end on any of a few lanes."""
    ends = [(block.start[:, :8] + block.duration[:, :8]).max(axis=0) for block in graph.blocks]
    return float(np.median(np.concatenate(ends)))


def _settled(samples: Floats, times: Floats, *, floor_s: float, dp_ranks_tied: bool, stages_tied: bool) -> Clocks:
    """Offsets and drifts that stand out, from how far each clock was ahead in each step, [steps, stages, dp_ranks].

    `times`: when each step began, seconds, [steps]. Offsets below `floor_s` are left alone.
    """
    steps = len(samples)
    runs = _runs(steps)
    levels = np.stack([np.median(samples[run], axis=0) for run in runs])
    centres = np.array([np.median(times[run]) for run in runs])
    line = _line(levels, centres - times.mean())
    drift, offset = line.slope, line.level
    left = samples - offset - drift * (times - times.mean())[:, None, None]
    scatter = MEDIAN_ERROR * MAD_TO_SIGMA * np.median(np.abs(left), axis=0) / np.sqrt(steps)
    error = np.maximum(scatter, line.error)
    if steps < FEWEST_STEPS:
        error = np.full_like(error, MAD_TO_SIGMA * float(np.median(np.abs(samples))))
    steady = (np.sign(samples) == np.sign(offset)).mean(axis=0) >= STEADY_SHARE
    span = np.abs(drift) * (times[-1] - times[0])
    # A slope over the whole trace has sqrt(12) times the standard error of a level.
    drifts = span > np.maximum(floor_s, OFFSET_ERRORS * np.sqrt(12) * error)
    off = drifts | ((np.abs(offset) > np.maximum(floor_s, OFFSET_ERRORS * error)) & steady)
    return Clocks(
        offset_s=np.where(off, offset, 0.0),
        drift=np.where(drifts, drift, 0.0),
        error_s=error,
        dp_ranks_tied=dp_ranks_tied,
        stages_tied=stages_tied,
    )


def _runs(steps: int) -> list[Ints]:
    """The positions of the steps in runs of neighbours."""
    return np.array_split(np.arange(steps), max(1, min(RUNS, steps // STEPS_PER_RUN)))


@dataclass(frozen=True, slots=True)
class _Line:
    """A straight line through levels: slope, level at time 0, and the level's standard error."""

    slope: Floats
    level: Floats
    error: Floats


def _line(levels: Floats, times: Floats) -> _Line:
    """The line through `levels` [runs, ...] measured at `times` [runs]; a constant where the runs are few."""
    if len(levels) < FEWEST_RUNS:
        middle = np.asarray(np.median(levels, axis=0))
        return _Line(np.zeros_like(middle), middle, np.zeros_like(middle))
    flat = levels.reshape(len(levels), -1)
    slope = np.asarray(np.polyfit(times, flat, 1)[0])
    level = np.asarray(np.median(flat - slope * times[:, None], axis=0))
    left = flat - level - slope * times[:, None]
    error = np.asarray(left.std(axis=0, ddof=2) / np.sqrt(len(levels)))
    shape = levels.shape[1:]
    return _Line(slope.reshape(shape), level.reshape(shape), error.reshape(shape))
