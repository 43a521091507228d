"""Order of parameter gathering: each chunk's before its first forward, or those of all chunks before the first compute.

In: structures made by the rules of the published method, and recorded times of some of their lanes. Out: the order that
the job follows, and structures with the matching edges. In the published method, gathering a chunk precedes the chunk's
first forward. An optimizer that does not overlap gathering with the forwards waits for all of it. With virtual stages,
a slow gathering of a later chunk then holds up the first forward, which is not a launch delay.

As for posted receives (`posting`), the decisive ops vote: those that could have begun before all was gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.graph.rules.megatron import BACKWARD, COMPUTE_STREAM, FORWARD
from tracekit.analysis.graph.rules.posting import FEWEST_TELLING, OBEYED_SHARE, SMALLEST_GAP_S, RecordedLanes, chain
from tracekit.analysis.graph.structure import Structure
from tracekit.analysis.numeric.arrays import Ints
from tracekit.trace.model import OpKind

#: Work of a worker's host, in the order of its computes.
HOST_KINDS = tuple(kind for kind in COMPUTE_STREAM if kind not in (FORWARD.compute, BACKWARD.compute))


def gathers_first(jobs_lanes: Iterable[RecordedLanes]) -> bool:
    """True if the first compute of each stage waits for the parameters of all chunks."""
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


def with_gathering_among_work(structure: Structure, lanes: RecordedLanes) -> Structure:
    """The structure with gatherings and host work (data loading, a checkpoint) in the order in which its lanes did
    them.

    The thread that does the work also requests the parameters, so each gathering begins after the work before it. Work
    begins after a gathering if the thread waited for that. `lanes`: of this structure, as recorded.
    """
    before, after = [], []
    for works, gathers in _leading_work(lanes.structure):
        done, work_before = 0, []  # the amount of work before each gathering
        for gather in gathers:
            behind = [number for number, work in enumerate(works, 1) if lanes.is_behind(work, gather)]
            if max(behind, default=0) > done:
                done = behind[-1]
                before.append(works[done - 1])
                after.append(gather)
            work_before.append(done)
        for position, work in enumerate(works):
            asked = (gather for gather, done in zip(gathers, work_before, strict=True) if done <= position)
            waited_for = [gather for gather in asked if lanes.is_behind(gather, work)]
            if waited_for:
                before.append(waited_for[-1])
                after.append(work)
    return replace(
        structure,
        before=np.concatenate([structure.before, before]).astype(np.int64),
        after=np.concatenate([structure.after, after]).astype(np.int64),
    )


def _leading_work(structure: Structure) -> Iterator[tuple[list[int], list[int]]]:
    """The host work before the first compute of each stage, and the gatherings there, each in order."""
    kind, before, after = structure.kind, structure.before, structure.after
    work = np.isin(kind, [host.code for host in HOST_KINDS])
    computes = np.isin(kind, (FORWARD.compute.code, BACKWARD.compute.code))
    gathering = kind == OpKind.PARAMS_ALL_GATHER.code
    in_stream = (work | computes)[before] & (work | computes)[after]
    next_work = dict(zip(before[in_stream].tolist(), after[in_stream].tolist(), strict=True))
    of_gathers = gathering[before] & gathering[after]
    next_gather = dict(zip(before[of_gathers].tolist(), after[of_gathers].tolist(), strict=True))
    for stage in np.unique(structure.pp_rank[gathering]):
        of_stage = structure.pp_rank == stage
        first_work = np.setdiff1d(np.flatnonzero(of_stage & work), after[in_stream])
        first_gather = np.setdiff1d(np.flatnonzero(of_stage & gathering), after[of_gathers])
        if len(first_work) == 1 and len(first_gather) == 1:
            yield (
                list(chain(int(first_work[0]), next_work, work)),
                list(chain(int(first_gather[0]), next_gather, gathering)),
            )


def with_gathers_first(structure: Structure) -> Structure:
    """The structure with the first compute of each stage after the gathering of all its parameters."""
    stages = list(_stages(structure))
    before = np.concatenate([structure.before, *(gathers for _, gathers in stages)])
    after = np.concatenate([structure.after, *(np.full(len(gathers), first) for first, gathers in stages)])
    return replace(structure, before=before, after=after)


def _stages(structure: Structure) -> Iterator[tuple[int, Ints]]:
    """The first compute of each stage that waits for only some gatherings, and the other gatherings."""
    computes = np.isin(structure.kind, (FORWARD.compute.code, BACKWARD.compute.code))
    gathering = structure.kind == OpKind.PARAMS_ALL_GATHER.code
    of_computes = computes[structure.before] & computes[structure.after]
    behind_a_compute = np.zeros(len(computes), np.bool_)
    behind_a_compute[structure.after[of_computes]] = True
    for stage in np.unique(structure.pp_rank[gathering]):
        of_stage = structure.pp_rank == stage
        first = np.flatnonzero(of_stage & computes & ~behind_a_compute)
        gathers = np.flatnonzero(of_stage & gathering)
        waited_for = np.intersect1d(structure.before[np.isin(structure.after, first)], gathers)
        if len(first) == 1 and len(waited_for) and len(waited_for) < len(gathers):
            yield int(first[0]), np.setdiff1d(gathers, waited_for)
