"""The lanes of a whole job, of which a process may hold only some steps.

In: the `Lanes` of some steps. Out: `JobLanes`, the structures of all steps and the sample of lanes that shows by which
rules the job runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import chain

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.gaps import Gap, MissingOps
from tracekit.analysis.graph.lanes import LaneGroup, Lanes
from tracekit.analysis.graph.rules.posting import RecordedLanes, sampled_lanes
from tracekit.analysis.graph.structure import Structure
from tracekit.analysis.numeric.arrays import Int32s, Ints
from tracekit.analysis.numeric.whole import by_name
from tracekit.trace.model import KINDS, OpKind

#: Digest of a structure, and how many structures before it are equal.
StructureKey = tuple[str, int]
_Here = tuple[Structure, Int32s, Int32s, int]
_Part = tuple[Mapping[StructureKey, _Here], tuple[tuple[int, int], ...], MissingOps, float]


class JobLanes(Struct, frozen=True, eq=False):
    """The lanes of a job. `structures`: each distinct one. `sampled`: some of its lanes, evenly spread: their step
    numbers and DP ranks, [lanes] each.

    `steps`, `lanes_of_step`: the step numbers, and how many lanes each has, [steps]. `dp_ranks`: ascending. `ops`: the
    number of ops. `dropped`: as `Lanes.dropped_lanes`. `gaps`: of `Lanes.missing`.
    `first_s`: start of the first op of any step, seconds after the step's.
    """

    structures: Mapping[StructureKey, Structure]
    sampled: Mapping[StructureKey, tuple[Int32s, Int32s]]
    steps: Int32s
    lanes_of_step: Ints
    dp_ranks: Int32s
    ops: int
    dropped: tuple[tuple[int, int], ...]
    gaps: tuple[Gap, ...]
    first_s: float

    @property
    def kinds(self) -> tuple[OpKind, ...]:
        """The kinds of op, in the order of `OpKind`."""
        codes = np.unique(np.concatenate([structure.kind for structure in self.structures.values()]))
        return tuple(KINDS[code] for code in codes)

    def samples_in(self, lanes: Lanes) -> dict[StructureKey, RecordedLanes]:
        """The sampled lanes that are among `lanes`, in their order."""
        return {
            key: _recorded(group.only(_find(group, lanes.steps, *self.sampled[key])))
            for key, group in by_key(lanes).items()
        }


def by_key(lanes: Lanes) -> dict[StructureKey, LaneGroup]:
    """The lanes by structure."""
    groups: dict[StructureKey, LaneGroup] = {}
    for group in lanes.groups:
        digest, again = _digest(group.structure), 0
        while (digest, again) in groups:
            again += 1
        groups[digest, again] = group
    return groups


def lanes_here(lanes: Lanes) -> _Part:
    """What some steps contribute to `JobLanes`: each structure, the step numbers and DP ranks of its lanes, and the
    number of their ops; the lanes that were dropped; the ops that are missing; and `first_s`.
    """
    groups = {
        key: (group.structure, lanes.steps[group.step], group.dp_rank, group.ops)
        for key, group in by_key(lanes).items()
    }
    return groups, lanes.dropped_lanes, lanes.missing, min(float(group.start.min()) for group in lanes.groups)


def merged_lanes(parts: Sequence[_Part]) -> JobLanes:
    """The lanes of a job from the `lanes_here` of its batches of steps."""
    groups, dropped, missing, first_s = zip(*parts, strict=True)
    structures: dict[StructureKey, Structure] = {}
    sampled, every_step, every_rank = {}, [], []
    for key, of_batches in by_name(groups).items():
        structures[key] = of_batches[0][0]
        step, dp_rank = (np.concatenate([one[at] for one in of_batches]) for at in (1, 2))
        chosen = sampled_lanes(len(step))
        sampled[key] = step[chosen], dp_rank[chosen]
        every_step.append(step)
        every_rank.append(dp_rank)
    steps, lanes_of_step = np.unique(np.concatenate(every_step), return_counts=True)
    return JobLanes(
        structures,
        sampled,
        steps,
        lanes_of_step,
        np.unique(np.concatenate(every_rank)),
        ops=sum(here[3] for part in groups for here in part.values()),
        dropped=tuple(chain.from_iterable(dropped)),
        gaps=MissingOps.joined(missing).gaps(),
        first_s=min(first_s),
    )


def merged_samples(parts: Sequence[Mapping[StructureKey, RecordedLanes]]) -> dict[StructureKey, RecordedLanes]:
    """The sampled lanes of a job from the `samples_in` of its batches of steps."""
    return {key: RecordedLanes.joined(some) for key, some in by_name(parts).items()}


def _recorded(group: LaneGroup) -> RecordedLanes:
    end = group.start + group.duration
    return RecordedLanes(group.structure, group.start, end, group.present, group.posted, group.resumed)


def _find(group: LaneGroup, steps: Int32s, step: Int32s, dp_rank: Int32s) -> Ints:
    """The lanes of a group, in order, that have one of these step numbers and DP ranks."""
    width = int(max(group.dp_rank.max(), dp_rank.max())) + 1
    lane_keys = steps[group.step].astype(np.int64) * width + group.dp_rank
    return np.flatnonzero(np.isin(lane_keys, step.astype(np.int64) * width + dp_rank))


def _digest(structure: Structure) -> str:
    """A digest of the ops and edges of a structure."""
    columns = (getattr(structure, name) for name in ("pp_rank", "kind", "seq", "chunk", "before", "after", "group"))
    digest = blake2b(digest_size=16)
    for column in columns:
        digest.update(np.ascontiguousarray(column, np.int64).tobytes())
    return digest.hexdigest()
