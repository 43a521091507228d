"""Factors of compute costs: stage, workload, position in the step, DP rank, worker, step, pauses.

In: a `ComputeTable`. Out: a `ComputeProfile`, which models the cost of a compute as
    stage and chunk x (1 + elasticity x (workload - 1)) x position x worker in that step, plus a pause.
The workload of a microbatch is the factor that all stages of its DP rank share; it splits into DP rank x step x
microbatch.

Each factor is a median over all others, so that one cause is not mistaken for another: a slow worker does not affect a
stage, a long microbatch no worker, a pause no microbatch. Forwards and backwards of a worker have separate factors:
what slows down one need not slow down the other, and the median of a mixture of fast and slow ops is neither.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct, structs

from tracekit.analysis.evidence.hidden_slowness import (
    NOBODY,
    faster_minority,
    of_long_data,
    quiet_level,
    slow_in_square,
    told_by_optimizers,
    unclear_turns,
    usual_worker,
)
from tracekit.analysis.evidence.off_cpu import core_pace, stands_out
from tracekit.analysis.evidence.significance import Episodes, episodes_of, most_telling, needed_nats
from tracekit.analysis.graph.op_grid import ComputeTable
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.statistics import (
    MAD_TO_SIGMA,
    SAMPLE,
    lower_median,
    median,
    nan_mean,
    safe,
    sampled,
    spread_of_logs,
)


class ComputeThresholds(Struct, frozen=True):
    """When computes differ by more than noise, and in what. `causes`: the benchmark of 582 simulated jobs."""

    #: This quantile of the microbatches represents a DP rank or a step. Statistic: packed lengths have a floor, near
    #: which quantiles scatter least.
    quartile: float = 0.25
    #: A pause is at least this share of the compute that it interrupts ... Benchmark `causes`.
    pause: float = 0.5
    #: ... and this many spreads long. Statistic: no normal compute of a million is.
    pause_spreads: float = 8.0
    #: A worker, DP rank or step that is slower by less than this is not worth naming. Chosen: no fix pays for less.
    factor: float = 0.04
    #: Forwards and backwards of microbatches that differ in length correlate by this much ... Benchmark `causes`.
    correlation: float = 0.6
    #: ... and differ by this much. Chosen: as `factor`.
    length_spread: float = 0.04
    #: In a slow step, the shortest microbatches exceed the usual ones by this share of its excess. Benchmark
    #: `causes`.
    shortest_share: float = 0.5
    #: Values this many spreads above their peers do not count as usual. Statistic: one normal value of 30,000.
    spreads: float = 4.0
    #: Workloads that differ by less than this do not show how strongly a stage follows them. Chosen: as `factor`.
    workload_spread: float = 0.04
    #: A stage follows the workload fully unless its slope differs by this much. Benchmark `causes`.
    inelasticity: float = 0.05
    #: Computes further from the workload than this were paused. Definition: as `pause`.
    deviation: float = 0.5
    #: A place in the step that is slower by at least this is slow. Chosen: as `factor`.
    position: float = 0.04
    #: Places are compared with each other, so there must be at least this many ... Definition.
    fewest_places: int = 3
    #: ... of which at most this share is slow. Definition: the others are usual.
    slow_share: float = 0.5
    #: Of fewer stages, quiet steps of the others do not tell long sequences of a DP rank. Definition: two compare.
    fewest_stages: int = 3
    #: Neighbouring microbatches are related if they correlate by this much ... Statistic: sequence lengths do not
    #: correlate; a walk that forgets within one microbatch or more correlates by exp(-1) = 0.37 at least, and by half
    #: as much next to the mean of a few.
    memory: float = 0.18
    #: ... and this many standard errors. Statistic: one normal value of 30,000.
    memory_errors: float = 4.0


COMPUTES = ComputeThresholds()
#: The first and the last of a table's kinds. In inference and evaluation, both are the forwards.
FORWARD, BACKWARD = 0, -1


class ComputeProfile(Struct, frozen=True, eq=False):
    """Factors of compute costs. All but the seconds are relative: 1 = like the others.

    `base_s`: seconds, [kinds, stages, chunks]; `elasticity`: how strongly a stage follows the workload, 1 = fully, same
    shape. `position`: of the microbatches of a step, on all ranks, [kinds, microbatches].

    `workers`: the steps in which each worker is slow compared with its peers of the same stage, beyond the factor of
    its DP rank; one member per (stage, DP rank). Without a pipeline, nothing is shared. `ranks`: the steps in which
    each DP rank is slow on all its stages. `worker_by_step`: [kinds, stages, steps, dp_ranks], `rank_by_step`: [steps,
    dp_ranks], as measured; `slow_worker`, `slow_rank`: the same, but 1 unless the factor is significant.

    `step`: [steps], all workers together; `steps`: the slow steps, one member; `slow_step`: 1 in all other steps.
    `workload`: [microbatches, steps, dp_ranks]; `microbatch`: the same without slow DP ranks and steps, mean 1 per job.

    `op_scatter`: standard deviation of ops around the factors, relative. `length_correlation`: correlation of forwards
    and backwards over the microbatches of one DP rank and step; `length_spread`: standard deviation of those backwards,
    relative; both 0 in a job with one kind, and where lengths cannot be told from the speed of shared cores.

    `unclear_workers` [stages, dp_ranks], `unclear_steps` [steps]: masks of those of which one computes slower, or whose
    microbatches are longer: nothing recorded tells which. `unclear_stages`: stages of which workers seem to be slow in
    turn, but so often that nothing shows how fast they are, [stages].

    `core_pace`: on shared cores, that of each worker over that of peers while it does other kinds of work, [kinds,
    stages, steps, dp_ranks]; else None.
    """

    base_s: Floats
    elasticity: Floats
    position: Floats
    workers: Episodes
    ranks: Episodes
    worker_by_step: Floats
    rank_by_step: Floats
    slow_worker: Floats
    slow_rank: Floats
    step: Floats
    steps: Episodes
    slow_step: Floats
    workload: Floats
    microbatch: Floats
    op_scatter: float
    length_correlation: float
    length_spread: float
    unclear_workers: Bools
    unclear_steps: Bools
    unclear_stages: Bools
    core_pace: Floats | None

    @property
    def stage_s(self) -> Floats:
        """Forward plus backward seconds of each chunk, [stages, chunks]."""
        return np.asarray(self.base_s.sum(axis=0))

    @property
    def slow_workers(self) -> Bools:
        """Workers that are slow compared with their peers, [stages, dp_ranks]."""
        shape = self.worker_by_step.shape
        return self.workers.significant(COMPUTES.factor).reshape(shape[1], shape[3])

    @property
    def slow_ranks(self) -> Bools:
        """DP ranks that are slow on all stages, [dp_ranks]."""
        return self.ranks.significant(COMPUTES.factor)

    @property
    def slow_steps(self) -> Bools:
        """The steps in which each slow worker is slow, [stages, steps, dp_ranks]."""
        _, stages, steps, dp_ranks = self.worker_by_step.shape
        return self.workers.slow.reshape(stages, dp_ranks, steps).transpose(0, 2, 1)


def profile_computes(
    table: ComputeTable, optimizer: Floats | None = None, other_work_s: Floats | None = None
) -> ComputeProfile:
    """Split the costs of `table` into factors. The table must not be empty.

    `optimizer`: of each worker over that of its peers, [stages, steps, dp_ranks]; None: as fast as theirs.
    `other_work_s`: seconds of other kinds of work, [kinds, stages, steps, dp_ranks], if workers share cores.
    """
    grid = table.grid
    square = (grid.shape[1], grid.shape[5]) == (2, 2)
    slow = np.ones((1, 1, 1, 1))
    if square and optimizer is not None:
        slow = slow_in_square(grid, optimizer, COMPUTES.factor)
    told_apart = bool((slow > 1).any())
    if told_apart:
        grid = grid / slow[:, :, None, None]
    # On shared cores, workers are slow in turn because of what runs beside them.
    own_cores = other_work_s is None
    fast, cells = np.zeros((grid.shape[1], grid.shape[5]), np.bool_), median(grid, (3,))
    if own_cores:
        fast = faster_minority(cells.sum(axis=(0, 2)))
    base = _usual(cells, own_cores, fast)
    relative = grid / safe(base)[:, :, :, None, None, None]
    position = position_factor(relative)
    if (position != 1).any():
        relative /= position[:, None, None, :, None, None]
    level = median(relative, (2, 3))
    # What all stages and both kinds of a DP rank share in a step. The lower median excludes a slow worker.
    slowness = level / safe(lower_median(level.reshape(-1, *level.shape[2:]), axis=0))
    work = workload(relative[BACKWARD], slowness[BACKWARD], None)
    elastic = elasticity(relative, slowness, work)
    if (elastic != 1).any():
        work = workload(relative[BACKWARD], slowness[BACKWARD], elastic[BACKWARD])
    # From step to step, the speed of a shared core varies as lengths do; only microbatches of one step tell them apart.
    tells_lengths = other_work_s is None or grid.shape[3] >= COMPUTES.fewest_places
    correlation, spread = _length_signature(relative, np.zeros(1, np.bool_)) if tells_lengths else (0.0, 0.0)
    uneven = uneven_lengths(correlation, spread) and not all(remembers(work))
    turns, unclear_stages = np.full(grid.shape[1], own_cores), np.zeros(grid.shape[1], np.bool_)
    if own_cores and not uneven:
        unclear_stages = np.asarray(unclear_turns(cells).any(axis=(0, 2)))
    elif own_cores and grid.shape[1] < COMPUTES.fewest_stages:
        turns = np.asarray(np.isfinite(quiet_level(cells)).any(axis=(0, 2, 3)))
        if optimizer is not None:  # a rank that has long sequences for some steps is not slow in turn
            turns &= np.isfinite(quiet_level(optimizer)).any(axis=1)
    model = _Model(base, elastic, position, work, turns, fast, unclear_stages, uneven, tells_lengths)
    alike = relative / safe(model.of_workload)
    if uneven:
        # DP ranks whose sequences happen to be shorter would make a stage look fast next to one where they are slow.
        model = structs.replace(model, base=base * _usual(median(alike, (3,)), turns[:, None], fast))
    beyond = median(alike, (2, 3)) * slow
    del relative, alike, grid
    return _factors(table.grid, model, beyond, optimizer, other_work_s, alike=square and not told_apart)


def _usual(cells: Floats, turns: Bools | bool, fast: Bools) -> Floats:
    """What the usual worker of each stage and chunk takes in the usual step, [kinds, stages, chunks].

    `cells`: of the usual microbatch, [kinds, stages, chunks, steps, dp_ranks]; `fast`: [stages, dp_ranks].

    First in each step: of workers that are slow in turn, each would be slow in the usual one of its own steps.
    """
    return median(usual_worker(cells, turns, fast[:, None, None]), (3,))


class _Model(Struct, frozen=True, eq=False):
    """The factors found before workers are compared; see `ComputeProfile`.

    `turns`: the stages of which workers may be slow in turn, [stages]; `fast`: workers faster than most throughout,
    [stages, dp_ranks]; `unclear_stages`: as of the profile. `uneven`: sequence lengths differ. `tells_lengths`: whether
    the trace can show that.
    """

    base: Floats
    elasticity: Floats
    position: Floats
    workload: Floats
    turns: Bools
    fast: Bools
    unclear_stages: Bools
    uneven: bool
    tells_lengths: bool

    @property
    def of_workload(self) -> Floats:
        """The part of the cost that follows the workload, relative; broadcasts to the table."""
        if (self.elasticity == 1).all():
            return self.workload
        return np.asarray(1 + self.elasticity[:, :, :, None, None, None] * (self.workload - 1))


def _factors(
    grid: Floats,
    model: _Model,
    beyond: Floats,
    optimizer: Floats | None,
    other_work_s: Floats | None,
    *,
    alike: bool,
) -> ComputeProfile:
    """Separate workers, DP ranks and steps. `beyond`: cost beyond the workload, [kinds, stages, steps, dp_ranks].

    `alike`: with two stages on two DP ranks, one slow worker looks like the diagonally opposite worker being slow,
    except for the cost of their microbatches. So who it is, and by how much, is no more certain than that cost.
    """
    _, stages, steps, dp_ranks = beyond.shape
    work = model.workload
    rank, rank_error = _typical(work, (0,))
    fast = model.fast[:, None]
    rank_log = _beside_peers(rank, other_work_s is None and not model.uneven, np.asarray(fast.all(axis=0)))
    # Even if the steps of a short trace look alike, the quartile of a few microbatches is no more precise than this.
    unsure = float(np.median(rank_error)) ** 2 * (2 if dp_ranks == 2 else 1)
    if model.uneven:
        beside_rank = work / safe(_typical(work, (0, 1))[0])  # a slow DP rank is no chance
        unsure = max(unsure, float(_beside_peers(_dealt_by_chance(beside_rank, 2), False).var()))
    ranks = episodes_of(rank_log.T, dp_ranks, least_variance=unsure)
    # Without a pipeline, a DP rank cannot be distinguished from its only worker.
    by_step = beyond * rank if stages == 1 else beyond
    seconds = model.base.sum(axis=2)[:, :, None, None]
    all_kinds = _beside_peers((by_step * seconds).sum(axis=0) / safe(seconds.sum(axis=0)), model.turns, fast)
    if stages > 1:
        unsure = float(ranks.noise.variance.mean()) if alike else 0.0
    by_kind = _beside_peers(by_step, model.turns, fast)
    # A slowdown of one kind shows best against the same kind on the peers, where noise of the other kind does not hide
    # it.
    share = seconds / safe(seconds.sum(axis=0))
    over_peers = None
    if other_work_s is not None and dp_ranks > 1:
        over_peers = np.concatenate([by_kind, np.where(other_work_s > 0, _beside_peers(other_work_s, False), np.nan)])
        by_kind = by_kind - core_pace(over_peers)[: len(by_kind)]
        all_kinds = np.log1p((share * np.expm1(by_kind)).sum(axis=0))
    views = [all_kinds, *np.log1p(share * np.expm1(by_kind))]
    members = [view.transpose(0, 2, 1).reshape(-1, steps) for view in views]
    workers = most_telling([episodes_of(view, dp_ranks, least_variance=unsure) for view in members])
    unclear_workers = np.zeros((stages, dp_ranks), np.bool_)
    if alike and not workers.significant(COMPUTES.factor).any():
        either = most_telling([episodes_of(view, dp_ranks) for view in members])
        unclear_workers = either.significant(COMPUTES.factor).reshape(stages, dp_ranks)
    if over_peers is not None:
        slow = workers.slow.reshape(stages, dp_ranks, steps).transpose(0, 2, 1)
        stands_out_ = stands_out(over_peers, slow)[: len(by_kind)].any(axis=0)
        workers = structs.replace(workers, nats=np.where(stands_out_.ravel(), workers.nats, 0.0))
    if alike:
        unsure = float(workers.noise.variance.mean())
        ranks = episodes_of(rank_log.T, dp_ranks, least_variance=unsure)
    if model.uneven:
        optimizers = None if optimizer is None else lower_median(optimizer, axis=0)
        if stages == 1:
            of_data = of_long_data(workers, by_kind, optimizers)
            unclear_workers |= of_data & workers.slow.all(axis=1) & workers.significant(COMPUTES.factor)
            workers, by_kind = told_by_optimizers(workers, by_kind, optimizers, of_data, COMPUTES.factor)
        else:
            of_data = of_long_data(ranks, rank_log, optimizers)
            ranks, rank_log = told_by_optimizers(ranks, rank_log, optimizers, of_data, COMPUTES.factor)
    slow_worker = np.exp(_slow_levels(by_kind, workers))
    slow_rank = np.exp(_slow_levels(rank_log, ranks))
    # Without a pipeline, a worker's workload includes what slows down forwards and backwards alike, see
    # `profile_computes`.
    shared = slow_worker.min(axis=0)[0] if stages == 1 else slow_rank
    step, steps_alike, slow_step, unclear_steps = _slow_steps(work / shared, uneven=model.uneven)
    microbatch = work / shared / slow_step[:, None]
    quiet = median(np.where(slow_worker > 1, np.nan, beyond), (2,))[:, :, None, :]
    # Without a pipeline, a slow worker is already part of the workload, except for the kind that is not slow.
    beyond_workload = np.where(slow_worker > 1, beyond if stages == 1 else slow_worker, np.nan_to_num(quiet, nan=1.0))
    paused, scatter = _pauses(grid, model, beyond_workload)
    usual_s = model.base[:, :, :, None] * model.position[:, None, None]
    signature = grid / safe(usual_s)[..., None, None]
    correlation, spread = _length_signature(signature, paused) if model.tells_lengths else (0.0, 0.0)
    return ComputeProfile(
        unclear_stages=model.unclear_stages,
        base_s=model.base * (1 + model.elasticity * (float(median(work, (0, 1, 2))) - 1)),
        elasticity=model.elasticity,
        position=model.position,
        workers=workers,
        ranks=ranks,
        worker_by_step=np.exp(by_kind),
        rank_by_step=np.exp(rank_log),
        slow_worker=slow_worker,
        slow_rank=slow_rank,
        step=step,
        steps=steps_alike,
        slow_step=slow_step,
        workload=work,
        microbatch=microbatch / safe(np.nanmean(microbatch)),
        op_scatter=scatter,
        length_correlation=correlation,
        length_spread=spread,
        unclear_workers=unclear_workers,
        unclear_steps=unclear_steps,
        core_pace=None if over_peers is None else np.exp(core_pace(over_peers)[len(by_kind) :]),
    )


def _slow_steps(work: Floats, *, uneven: bool) -> tuple[Floats, Episodes, Floats, Bools]:
    """Return the factor of each step, a mask of slow steps, the factor of the slow ones, else 1, and a mask of steps
    that are longer than sequences dealt by chance make them, but not longer than steps differ, [steps] each.
    """
    step, step_error = _typical(work, (0, 2))
    step = step / safe(lower_median(step, axis=0))
    unsure = float(np.median(step_error)) ** 2
    if uneven:
        unsure = max(unsure, float(np.log(safe(_dealt_by_chance(work, 1))).var()))
    alike = episodes_of(np.log(safe(step))[None], len(step), least_variance=unsure, fewest=1, remembers=False)
    slow = alike.slow[0] & alike.significant(COMPUTES.factor)[0]
    unclear = np.zeros(len(step), np.bool_)
    if uneven:
        shortest = np.nanmin(np.where(np.isfinite(work), work, np.inf), axis=(0, 2))
        all_longer = shortest / safe(lower_median(shortest, axis=0)) - 1 > COMPUTES.shortest_share * (step - 1)
        slow &= all_longer
        longer = all_longer & (step - 1 >= COMPUTES.factor)
        unclear = longer & ~slow & (np.log(safe(step)) ** 2 / 2 / safe(unsure) >= needed_nats(len(step)))
    return step, alike, np.where(slow, step, 1.0), unclear


def _dealt_by_chance(work: Floats, axis: int) -> Floats:
    """The typical microbatch of each step and DP rank (axis 2), or of each step (1), if each held those of all others.

    Takes the m-th microbatch of DP rank d from the m-th member after it, along the axis.
    """
    microbatch, step, dp_rank = np.ogrid[tuple(slice(count) for count in work.shape)]
    if axis == 2:
        return _typical(work[microbatch, step, (dp_rank + microbatch) % work.shape[2]], (0,))[0]
    turned = (step + microbatch * work.shape[2] + dp_rank) % work.shape[1]
    return _typical(work[microbatch, turned, dp_rank], (0, 2))[0]


def uneven_lengths(correlation: float, spread: float) -> bool:
    """True if microbatches differ as sequences of unequal length do, see `_length_signature`."""
    return correlation >= COMPUTES.correlation and spread >= COMPUTES.length_spread


def _beside_peers(values: Floats, turns: Bools | bool, fast: Bools = NOBODY) -> Floats:
    """Log of values over those of the peers that are not slow in that step, [..., steps, dp_ranks]; 0 without peers.

    `turns`, `fast`: as of `quiet_level`.
    """
    logs = np.log(safe(values))
    logs[~np.isfinite(values)] = np.nan
    if values.shape[-1] < 2:
        return np.zeros_like(logs)
    quiet = quiet_level(values, turns, fast)[..., None]
    return np.where(np.isnan(quiet), _beside_most(logs, fast), logs - np.log(safe(quiet)))


def _beside_most(logs: Floats, fast: Bools) -> Floats:
    """Logs less those of the peers that are not slow in that step, if most are not, nor `fast`.

    The first pass uses the lower median of all; the second pass leaves out what exceeds that median, and the members
    that do so on average if there are several: half of them would shift the mean, but hide in the noise of one step.
    """
    if logs.shape[-1] == 2:  # with two workers, each has one peer
        return np.asarray(logs - logs[..., ::-1])
    usual = np.where(fast, np.nan, logs)
    distance, cut = _beside_usual(usual)
    far = np.abs(distance) > cut
    mean, cut_of_mean = _beside_usual(nan_mean(distance, (distance.ndim - 2,)))
    slow = mean > max(cut_of_mean, cut / np.sqrt(distance.shape[-2]))
    far |= (slow & (slow.sum(axis=-1, keepdims=True) > 1))[..., None, :]
    quiet = np.where(far, np.nan, usual)
    return np.asarray(logs - nan_mean(quiet, (quiet.ndim - 1,))[..., None])


def _beside_usual(logs: Floats) -> tuple[Floats, float]:
    """Distance of values from the lower median of the last axis, and the least distance that stands out."""
    distance = logs - lower_median(logs, axis=-1)[..., None]
    low = distance[distance < 0]
    sigma = MAD_TO_SIGMA * float(np.median(-low)) if low.size else 0.0
    return distance, max(COMPUTES.spreads * sigma, COMPUTES.factor / 2)


def _slow_levels(over_peers: Floats, episodes: Episodes) -> Floats:
    """Log of each member's slowdown in each step, 0 if that is not significant.

    `over_peers`: as measured, [..., steps, dp_ranks]. Takes the mean over the steps in which a member is slow, plus the
    part of the deviation from it that exceeds noise: the result follows a moving level, but not its noise.
    """
    steps, dp_ranks = over_peers.shape[-2:]
    hit = episodes.slow & episodes.significant(COMPUTES.factor)[:, None]
    by_stage = hit.reshape(-1, dp_ranks, steps).transpose(0, 2, 1)
    hit_steps = np.broadcast_to(by_stage if over_peers.ndim > 2 else by_stage[0], over_peers.shape)
    values = np.where(hit_steps & np.isfinite(over_peers), over_peers, 0.0)
    count = np.maximum((hit_steps & np.isfinite(over_peers)).sum(axis=-2, keepdims=True), 1)
    level = values.sum(axis=-2, keepdims=True) / count
    deviation = np.where(hit_steps & np.isfinite(over_peers), over_peers - level, 0.0)
    variance = (deviation**2).sum(axis=-2, keepdims=True) / np.maximum(count - 1, 1)
    beyond_noise = np.maximum(1 - float(np.median(episodes.noise.variance)) / np.maximum(variance, 1e-12), 0.0)
    return np.where(hit_steps, np.maximum(level + beyond_noise * deviation, 0.0), 0.0)


def _typical(values: Floats, axes: tuple[int, ...]) -> tuple[Floats, Floats]:
    """The typical value over `axes` and its standard error, relative.

    It is the lower quartile: costs of packed microbatches have a floor (the part that grows with tokens, equal for all)
    and a long tail, so the quartile scatters less than the median. Its error follows from the distance between the
    neighbouring quantiles.
    """
    quantile = np.nanquantile if np.isnan(values).any() else np.quantile
    count = np.isfinite(values).sum(axis=axes)
    values = np.where(np.expand_dims(count, axes) > 0, values, 1.0)  # no computes: same as the others
    share = COMPUTES.quartile
    low, typical, high = quantile(values, (share - 0.1, share, share + 0.1), axis=axes)
    error = np.sqrt(share * (1 - share) / np.maximum(count, 1)) * (high - low) / 0.2
    return typical, error / safe(typical)


def _pauses(grid: Floats, model: _Model, worker: Floats) -> tuple[Bools, float]:
    """Mask of the computes that exceed all factors by a pause; the scatter of ops around the factors.

    `worker`: factor beyond the workload, [kinds, stages, steps, dp_ranks].
    """
    expected = model.base[:, :, :, None, None, None] * worker[:, :, None, None] * model.of_workload
    if (model.position != 1).any():
        expected = expected * model.position[:, None, None, :, None, None]
    # Noise with mean one around the expectation: forwards and backwards scatter alike.
    ratio = grid / safe(expected)
    samples = [sampled(of_kind) for of_kind in ratio]
    centre = np.array([float(median(sample, (0,))) for sample in samples])[:, None, None, None, None, None]
    sigma = max(map(spread_of_logs, samples))
    ratio /= safe(centre)
    return ratio > 1 + max(COMPUTES.pause, COMPUTES.pause_spreads * sigma), sigma


def _length_signature(relative: Floats, paused: Bools) -> tuple[float, float]:
    """Correlation of forwards and backwards within a DP rank and step, averaged over stages; spread of backwards."""
    if len(relative) < 2:
        return 0.0, 0.0
    logs = np.log(np.maximum(relative, 1e-12))
    np.copyto(logs, np.nan, where=paused)
    over_stages: Any = nan_mean(logs, (1, 2))
    within = 0 if over_stages.shape[1] > 1 else 1
    deviation = over_stages - np.expand_dims(nan_mean(over_stages, (within + 1,)), within + 1)
    forward, backward = deviation[FORWARD].ravel(), deviation[BACKWARD].ravel()
    finite = np.isfinite(forward) & np.isfinite(backward)
    forward, backward = forward[finite], backward[finite]
    if len(forward) < 3 or forward.std() == 0 or backward.std() == 0:
        return 0.0, 0.0
    return float(np.corrcoef(forward, backward)[0, 1]), float(backward.std())


def workload(backward: Floats, slowness: Floats, elastic: Floats | None) -> Floats:
    """The workload that all stages of a DP rank share, per microbatch, 1 = the usual one.

    From backwards only, because pauses of Python do not reach them. `slowness`: factor of each worker, [stages, steps,
    dp_ranks]; `elastic`: of backwards, [stages, chunks], None: 1.
    """
    cells = backward / safe(slowness)[:, None, None]
    if elastic is not None:
        cells = 1 + (cells - 1) / elastic[:, :, None, None, None]
    return median(np.maximum(cells.reshape(-1, *cells.shape[2:]), 0.0), (0,))


def elasticity(relative: Floats, slowness: Floats, work: Floats) -> Floats:
    """Share of each stage's cost that follows the workload: 0.6 if four tenths are the same for all microbatches.

    The loss costs the same for each token, regardless of attention. Slopes come from the costliest and the cheapest
    quarter of the microbatches, and are relative to the stages' upper median, because most stages contain only layers.
    """
    shape = relative.shape
    # Evenly spaced lanes that make about SAMPLE cells.
    lanes = slice(None, None, max(1, int(np.prod(shape)) // (4 * SAMPLE)) | 1)
    work = work.reshape(shape[3], -1)[:, lanes].reshape(-1)
    beside = (relative / safe(slowness)[:, :, None, None]).reshape(*shape[:4], -1)[..., lanes]
    cells = beside.reshape(*shape[:3], -1)
    finite = np.isfinite(work)
    if shape[1] < 2 or finite.sum() < 8:
        return np.ones(shape[:3])
    low, high = np.quantile(work[finite], (0.25, 0.75))
    cheap, dear = finite & (work <= low), finite & (work >= high)
    if high - low < COMPUTES.workload_spread:
        return np.ones(shape[:3])
    difference = float(work[dear].mean() - work[cheap].mean())
    # A pause is not work.
    cells = np.where(np.abs(cells / safe(work) - 1) < COMPUTES.deviation, cells, np.nan)
    bottom, top = nan_mean(cells[..., cheap], (3,)), nan_mean(cells[..., dear], (3,))
    slope = (top - bottom) / difference
    elastic = slope / safe(bottom + slope * (1 - float(work[cheap].mean())))
    ordered = np.sort(elastic, axis=1)
    elastic = elastic / safe(ordered[:, elastic.shape[1] // 2].mean(axis=-1))[:, None, None]
    elastic = np.where(np.isfinite(elastic), np.clip(elastic, 0.1, 1.5), 1.0)
    return np.where(np.abs(elastic - 1) < COMPUTES.inelasticity, 1.0, elastic)


def position_factor(relative: Floats) -> Floats:
    """Relative duration of the microbatches at one place of each step, on all ranks, [kinds, microbatches].

    1 if a place does not stand out: by 4 %, in all steps, and by more than chance explains.
    """
    kinds, _, _, places, steps, _ = relative.shape
    factor = np.ones((kinds, places))
    if places < COMPUTES.fewest_places or steps < 2:
        return factor
    few = relative[..., :: max(1, relative.size // (4 * SAMPLE))]
    # Of two middle ones the faster: what slows down half of a rank's microbatches must not make the others look fast.
    over_usual = few / safe(lower_median(few, (2, 3)))[:, :, None, None]
    # Of two ranks, take the faster: what only one of them does is not due to the place.
    of_step = lower_median(np.moveaxis(over_usual, (1, 2, 5), (0, 1, 2)).reshape(-1, kinds, places, steps), axis=0)
    usual = lower_median(of_step, axis=1)[:, None]
    logs = np.log(safe(of_step / safe(usual)))
    episodes = episodes_of(logs.reshape(-1, steps), places)
    slow = (episodes.significant(COMPUTES.position) & episodes.slow.all(axis=1)).reshape(kinds, places)
    few_places = slow.mean(axis=1, keepdims=True) <= COMPUTES.slow_share
    return np.where(slow & few_places, np.exp(episodes.level).reshape(kinds, places), 1.0)


def remembers(work: Floats) -> tuple[bool, bool]:
    """True if microbatches cost like the previous ones on their DP rank: over the run, and within single steps.

    `work`: [microbatches, steps, dp_ranks]. The speed of a machine that wanders remembers in both. Sequence lengths are
    drawn independently for each microbatch. Even if a DP rank gets the long ones for some steps, those of one step come
    in any order. Too few microbatches do not show memory within a step; it is then assumed.
    """
    series = np.log(safe(work)).transpose(2, 1, 0)
    over_run, _ = _autocorrelation(series.reshape(len(series), -1))
    within, error = _autocorrelation(series)
    return (
        over_run > max(COMPUTES.memory, COMPUTES.memory_errors / np.sqrt(max(np.isfinite(work).sum(), 1))),
        len(work) < COMPUTES.fewest_places or within > max(COMPUTES.memory, COMPUTES.memory_errors * error) / 2,
    )


def _autocorrelation(series: Floats) -> tuple[float, float]:
    """Correlation of a value with the one before it, -1 to 1, and its error; rows (the last axis) have means of their
    own.
    """
    deviation = series - nan_mean(series, (series.ndim - 1,))[..., None]
    before, after = deviation[..., :-1], deviation[..., 1:]
    total, count = float(np.nansum(deviation**2)), series.shape[-1]
    if total <= 0 or count < 2:
        return 0.0, 0.0
    product = np.where(np.isfinite(before) & np.isfinite(after), before * after, 0.0)
    # The values of a short row are not independent of its mean.
    correlation = (float(product.sum()) / total * count + 1) / (count - 1)
    return correlation, float(np.sqrt((product**2).sum())) / total
