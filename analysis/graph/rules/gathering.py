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

from tracekit.analysis.graph.rules.megatron import BACKWARD, COMPUTE_STREAM, FORWARD
from tracekit.analysis.graph.rules.posting import FEWEST_TELLING, OBEYED_SHARE, SMALLEST_GAP_S, RecordedLanes
from tracekit.analysis.graph.structure import Structure
from tracekit.analysis.numeric.arrays import Ints
from tracekit.model import OpKind

#: What a worker's host does, in the order of its computes.
HOST_KINDS = tuple(kind for kind in COMPUTE_STREAM if kind not in (FORWARD.compute, BACKWARD.compute))


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


def work_before_gathering(jobs_lanes: Iterable[RecordedLanes]) -> frozenset[int]:
    """The kinds of host work (loading data, a checkpoint) behind which a step's first gathering begins, as codes."""
    votes: dict[int, Ints] = {}
    for lanes in jobs_lanes:
        for work, gather in _leading_work(lanes.structure):
            begin = lanes.start[lanes.structure.pp_rank == lanes.structure.pp_rank[gather]].min(axis=0)
            tells = lanes.end[work] - begin > SMALLEST_GAP_S
            behind = tells & (lanes.start[gather] > (begin + lanes.end[work]) / 2)
            cast = np.array([behind.sum(), tells.sum()])
            kind = int(lanes.structure.kind[work])
            votes[kind] = votes.get(kind, np.zeros(2, np.int64)) + cast
    return frozenset(kind for kind, (behind, tell) in votes.items() if tell and behind >= OBEYED_SHARE * tell)


def with_work_before_gathering(structure: Structure, kinds: frozenset[int]) -> Structure:
    """The structure with the first gathering of each stage behind what its host does first of those kinds."""
    found = [(work, gather) for work, gather in _leading_work(structure) if int(structure.kind[work]) in kinds]
    before = np.concatenate([structure.before, [work for work, _ in found]]).astype(np.int64)
    after = np.concatenate([structure.after, [gather for _, gather in found]]).astype(np.int64)
    return replace(structure, before=before, after=after)


def _leading_work(structure: Structure) -> Iterator[tuple[int, int]]:
    """Each op of host work before the first compute of a stage, with the first gathering there."""
    kind, before, after = structure.kind, structure.before, structure.after
    work = np.isin(kind, [host.code for host in HOST_KINDS])
    computes = np.isin(kind, (FORWARD.compute.code, BACKWARD.compute.code))
    gathering = kind == OpKind.PARAMS_ALL_GATHER.code
    waits = np.isin(np.arange(len(kind)), after)
    in_stream = (work | computes)[before] & (work | computes)[after]
    next_in_stream = dict(zip(before[in_stream].tolist(), after[in_stream].tolist(), strict=True))
    for stage in np.unique(structure.pp_rank[gathering]):
        of_stage = structure.pp_rank == stage
        gathers = np.flatnonzero(of_stage & gathering & ~waits)
        behind = np.isin(np.arange(len(kind)), after[in_stream])
        first = np.flatnonzero(of_stage & work & ~behind)
        if len(gathers) == 1 and len(first) == 1:
            at = int(first[0])
            while work[at]:
                yield at, int(gathers[0])
                if at not in next_in_stream:
                    break
                at = next_in_stream[at]


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
