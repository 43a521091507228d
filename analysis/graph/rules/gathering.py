"""When parameters are gathered: each chunk's before its first forward, or those of all chunks before the first compute.

In: structures made by the rules of the published method, and recorded times of some of their lanes. Out: whether the
job gathers first, and structures with its edges. The published method has a chunk's gathering precede the chunk's first
forward. An optimizer that does not overlap gathering with the forwards waits for all of it: with virtual stages a slow
gathering of a later chunk then holds up the first forward, which is no launch delay.

As for posted receives (`posting`), the ops that tell vote: those that could have begun before all was gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from tracekit.analysis.graph.rules.megatron import BACKWARD, FORWARD
from tracekit.analysis.graph.rules.posting import FEWEST_TELLING, OBEYED_SHARE, SMALLEST_GAP_S, RecordedLanes
from tracekit.analysis.graph.structure import Structure
from tracekit.analysis.numeric.arrays import Ints
from tracekit.model import OpKind


def gathers_first(jobs_lanes: Iterable[RecordedLanes]) -> bool:
    """Whether the first compute of each stage waits for the parameters of all chunks."""
    obeyed = telling = 0
    for lanes in jobs_lanes:
        waits_for, after = lanes.structure.before, lanes.structure.after
        for first, gathers in _stages(lanes.structure):
            anyway = lanes.end[waits_for[after == first]].max(axis=0)
            gathered = lanes.end[gathers].max(axis=0)
            tells = gathered - anyway > SMALLEST_GAP_S
            telling += int(tells.sum())
            obeyed += int((tells & (lanes.start[first] > (anyway + gathered) / 2)).sum())
    return telling >= FEWEST_TELLING and obeyed >= OBEYED_SHARE * telling


def with_gathers_first(structure: Structure) -> Structure:
    """The structure with the first compute of each stage behind the gathering of all its parameters."""
    found = list(_stages(structure))
    before = np.concatenate([structure.before, *(gathers for _, gathers in found)])
    after = np.concatenate([structure.after, *(np.full(len(gathers), first) for first, gathers in found)])
    return replace(structure, before=before, after=after)


def _stages(structure: Structure) -> Iterator[tuple[int, Ints]]:
    """The first compute of each stage that waits for one gathering of several, and the others it does not wait for."""
    computes = np.isin(structure.kind, (FORWARD.compute.code, BACKWARD.compute.code))
    gathering = structure.kind == OpKind.PARAMS_ALL_GATHER.code
    of_computes = computes[structure.before] & computes[structure.after]
    behind_a_compute = np.zeros(len(computes), np.bool_)
    behind_a_compute[structure.after[of_computes]] = True
    for stage in np.unique(structure.pp_rank[gathering]):
        here = structure.pp_rank == stage
        first = np.flatnonzero(here & computes & ~behind_a_compute)
        gathers = np.flatnonzero(here & gathering)
        waited_for = np.intersect1d(structure.before[np.isin(structure.after, first)], gathers)
        if len(first) == 1 and len(waited_for) and len(waited_for) < len(gathers):
            yield int(first[0]), np.setdiff1d(gathers, waited_for)
