"""Find the workers whose processes are stopped, as the kernel counted it.

In: the column `OFF_CPU` of a trace, and the computes of its job. Out: seconds by which each worker's computes were
longer in a step because its training thread neither ran nor was ready to run.

The kernel counts over the whole step, and waits of a thread between its computes, such as for a file, are host code. So
a process counts as stopped only if its computes are longer than those of quiet steps.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from tracekit.analysis.graph.dependency_graph import DependencyGraph
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.robust import lower_median, lower_quantile, median, of_peers, safe
from tracekit.trace.canonical import Trace
from tracekit.trace.schema import OFF_CPU

#: This share of a worker's steps counts as quiet. If it is stopped even in these, those of its peers count.
QUIET_SHARE = 0.25
#: Time off the CPU is common up to this quantile of the steps of the usual member.
HIGH_SHARE = 0.9
#: A worker is stopped if time beyond that takes this share of the step, in at least this many steps.
SMALLEST_STOP_SHARE, FEWEST_STOPS = 0.02, 3
#: If the usual member is off the CPU for more than this share of its computes, its thread waits for a device.
LARGEST_USUAL_SHARE = 0.25
#: Stops of at least this share of the longest one are the usual ones.
LEAST_OF_LONGEST = 0.25
#: A stop is no longer than the longest one seen, apart from noise.
LONGEST_OF_SEEN = 1.25
#: Times are alike if eight of ten are within this share of the middle one, and at one place if the share of one kind of
#: compute in them varies by less.
ALIKE = 0.5


def off_cpu_s(trace: Trace, graph: DependencyGraph) -> Floats:
    """Time in which the training thread of each rank of a worker neither ran nor was ready to run within its own ops,
    seconds, [stages, steps, dp_ranks, ranks]; 0 if that is unknown.
    """
    ranks = graph.layout.tp * graph.layout.cp
    off = np.zeros((graph.layout.pp, len(graph.steps), len(graph.dp_ranks), ranks))
    if OFF_CPU not in trace.ops.columns:
        return off
    ops, step, dp_index = replayed_ops(trace, graph, pl.col(OFF_CPU).list.len() == ranks)
    off[ops["pp_rank"].to_numpy(), step, dp_index] = ops[OFF_CPU].list.to_array(ranks).to_numpy()
    return off


def replayed_ops(trace: Trace, graph: DependencyGraph, chosen: pl.Expr) -> tuple[pl.DataFrame, Ints, Ints]:
    """The chosen ops of a trace that are in the graph, and the index of their step and of their DP rank, [ops]."""
    ops = trace.ops.filter(
        chosen & pl.col("step").is_in(graph.steps.tolist()) & pl.col("dp_rank").is_in(list(graph.dp_ranks))
    )
    step = np.searchsorted(graph.steps, ops["step"].to_numpy())
    return ops, step, np.searchsorted(graph.dp_ranks, ops["dp_rank"].to_numpy())


def within_computes(off_s: Floats, computes_s: Floats) -> Floats:
    """The part of `off_s` by which computes are longer than in quiet steps, seconds, [groups, peers, steps] each."""
    quiet_s = lower_quantile(computes_s, -1, QUIET_SHARE)
    quiet_s = np.minimum(quiet_s, lower_median(quiet_s, -1)[..., None])
    return np.minimum(off_s, np.maximum(computes_s - quiet_s[..., None], 0.0))


def stops_of(off_s: Floats, by_kind_s: Floats, step_s: float) -> tuple[Floats, Floats]:
    """Seconds that members are stopped in each step, 0 for those that others equal at times; and by which stops prolong
    their computes, [groups, peers, steps] each.

    `off_s`: time off the CPU, [groups, peers, steps]; `by_kind_s`: duration of computes, [kinds, groups, peers, steps];
    `step_s`: duration of a step. Seconds.
    """
    within_s = within_computes(off_s, by_kind_s.sum(axis=0))
    members, within, *kinds = (each.reshape(-1, off_s.shape[-1]) for each in (off_s, within_s, *by_kind_s))
    return _stops_of_members(members, within, np.stack(kinds), step_s).reshape(off_s.shape), within_s


def _stops_of_members(off_s: Floats, stops_s: Floats, by_kind_s: Floats, step_s: float) -> Floats:
    """As `stops_of`, of [members, steps]. `stops_s`: the part of `off_s` within computes."""
    none = np.zeros(off_s.shape)
    computes_s = by_kind_s.sum(axis=0)
    usual_share = float(lower_median((off_s / safe(computes_s)).mean(axis=1), 0))
    if usual_share > LARGEST_USUAL_SHARE:  # threads wait for the devices that compute
        return none
    # What keeps all members off the CPU in one step, such as a first step that loads libraries, stops none of them.
    off_s = np.maximum(off_s - of_peers(off_s, 0), 0.0)
    stops_s = np.minimum(stops_s, off_s)
    # Any thread is off the CPU for a moment in any step: what happens to all members now and then is not a stop.
    usual_s = float(lower_median(lower_quantile(off_s, -1, HIGH_SHARE), 0))
    beyond_s = np.maximum(stops_s - usual_s, 0.0)
    # Stops hit host code, too. But a thread that waits for a file does so there alone, however long its computes are.
    off_beyond_s = np.maximum(off_s - usual_s, 0.0)
    on = off_beyond_s > LEAST_OF_LONGEST * beyond_s.max(axis=1, keepdims=True)
    within = on & (beyond_s >= ALIKE * off_beyond_s)
    on = np.where(2 * within.sum(axis=1, keepdims=True) >= on.sum(axis=1, keepdims=True), on, within)
    costly = beyond_s.mean(axis=1) >= SMALLEST_STOP_SHARE * step_s
    longest_s = off_s.max(axis=1)
    costly &= longest_s > ALIKE * longest_s.max()  # next to longer stops of others, these are noise
    hit: Bools = costly & within.any(axis=1) & (on.sum(axis=1) >= FEWEST_STOPS)
    first_s = np.maximum(by_kind_s[0] - lower_quantile(by_kind_s[0], -1, QUIET_SHARE)[:, None], 0.0)
    for member in np.flatnonzero(hit):
        hit[member] = not _steady(off_s[member], beyond_s[member], first_s[member], on[member])
    if 2 * hit.sum() > hit.size:
        return none
    # Time off the CPU that a member also has in its other steps is not the stop.
    otherwise_s = median(np.where(on, np.nan, off_s), (1,))[:, None]
    lasts_s = np.maximum(stops_s, off_s - np.nan_to_num(otherwise_s))
    return np.where(on & hit[:, None], lasts_s, none)


def without_stops(seconds: Floats, taking_part: Bools, stop_s: tuple[float, float]) -> Floats:
    """The factor that makes ops as long, or as late, as they usually are where a process was stopped.

    A process that is stopped now and then is also stopped while it loads data or transfers it, where a thread has
    reason to wait, and between its ops: what lasts longer than in the middle step by about one of the stops seen
    elsewhere was one.

    `seconds`: [stages, ops, steps, dp_ranks], NaN where absent. `taking_part`: workers that are stopped or wait for one
    that is, [stages, dp_ranks]. `stop_s`: the usual stop and the longest one.
    """
    usual_s, longest_s = stop_s
    usually_s = median(seconds, (2,))[:, :, None]
    beyond_s = seconds - usually_s
    by_a_stop = (beyond_s > ALIKE * usual_s) & (beyond_s < LONGEST_OF_SEEN * longest_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        factor: Floats = np.where(taking_part[:, None, None] & by_a_stop, np.maximum(usually_s, 0.0) / seconds, 1.0)
    return factor


def _steady(off_s: Floats, beyond_s: Floats, first_s: Floats, on: Bools) -> bool:
    """True if a member is off the CPU for equally long in each step of a stretch, as if its code slept, [steps] each.

    Stops happen at any time, so some steps have none of them and others one or several, now in one kind of compute and
    now in another. `first_s`: by how much those of the first kind are longer than in quiet steps. `on`: the steps in
    question.
    """
    low, middle, high = np.quantile(off_s[on], (0.1, 0.5, 0.9))
    runs = int((np.diff(on.astype(np.int8), prepend=0) > 0).sum())
    by_chance = on.sum() * (len(on) - on.sum() + 1) / len(on)
    least, most = np.quantile(np.minimum(first_s[on] / safe(beyond_s[on]), 1.0), (0.1, 0.9))
    return bool(high - low < ALIKE * middle and runs <= max(1.0, by_chance / 2) and most - least < ALIKE)
