"""The dependency graph of a job: templates of ops, and the lanes each template holds for.

In: a `Trace`. Out: a `DependencyGraph`. Almost every job repeats one structure on every DP rank and step, so a
template is the graph of one lane and a block carries [rows, lanes] matrices of recorded times. Where the lanes of a
step differ in structure, the whole step becomes one template with one lane. One replay kernel serves both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numba as nb
import numpy as np
import numpy.typing as npt

from tracekit.analysis.lanes import Int32s, LaneGroup, place_lanes
from tracekit.analysis.structure import Floats, Ints, Structure
from tracekit.errors import GraphError
from tracekit.model import COMMUNICATION, KINDS, Layout, OpKind, Worker
from tracekit.trace import Trace

if TYPE_CHECKING:
    import networkx

#: (dp_rank, pp_rank, kind, seq)
Node = tuple[int, int, OpKind, int]

_IS_COMMUNICATION = np.array([kind in COMMUNICATION for kind in KINDS])


@dataclass(frozen=True, slots=True)
class Template:
    """A graph of ops, laid out for replay.

    Ops are rows, [rows] columns: `member` (which of its structures a row comes from), `pp_rank`, `kind`, `seq`,
    `chunk`, `is_communication`. Row r waits for `waits_for[first_wait[r]:first_wait[r + 1]]`.
    Rows that start their transfer together form a group; `order[first_of_group[g]:first_of_group[g + 1]]` are the
    rows of the g-th group, groups in replay order. `joins_lanes[g]`: the group also waits for the same group in all
    lanes of its step. `slot`: where a row's end time is kept while later rows need it; `slots` of them suffice.
    """

    member: Int32s
    pp_rank: npt.NDArray[np.int16]
    kind: npt.NDArray[np.uint8]
    seq: Int32s
    chunk: npt.NDArray[np.int16]
    is_communication: npt.NDArray[np.bool_]
    first_wait: Ints
    waits_for: Ints
    order: Ints
    first_of_group: Ints
    joins_lanes: npt.NDArray[np.bool_]
    slot: Ints
    slots: int

    @property
    def rows(self) -> int:
        """How many ops the template has."""
        return len(self.kind)


@dataclass(frozen=True, slots=True)
class Block:
    """A template and the lanes it holds for, ordered by step.

    `step`: index into `DependencyGraph.steps`, [lanes]. `first_lane`: where each step's lanes begin, [steps here + 1].
    `dp_rank`: [1, lanes], or [rows, 1] where one lane holds a whole step. `start`, `duration`: recorded seconds,
    [rows, lanes]. `microbatch`: [rows, 1] or [rows, lanes], -1 for none. `structures`: the template's members.
    """

    template: Template
    structures: tuple[Structure, ...]
    step: Int32s
    first_lane: Ints
    dp_rank: Int32s
    start: Floats
    duration: Floats
    microbatch: Int32s

    @property
    def lanes(self) -> int:
        """How many lanes the block has."""
        return int(self.start.shape[1])

    def only_lanes(self, lanes: Ints, step: Int32s) -> Block:
        """The block with only these lanes, whose steps are renumbered to `step`."""
        whole_steps = self.dp_rank.shape[1] == 1
        return replace(
            self,
            step=step,
            first_lane=first_lanes(step),
            dp_rank=self.dp_rank if whole_steps else self.dp_rank[:, lanes],
            start=np.ascontiguousarray(self.start[:, lanes]),
            duration=np.ascontiguousarray(self.duration[:, lanes]),
            microbatch=self.microbatch if self.microbatch.shape[1] == 1 else self.microbatch[:, lanes],
        )


@dataclass(frozen=True)
class DependencyGraph:
    """All ops of a job and what each waits for.

    `steps`: step numbers that can be replayed, [steps]. `dropped_lanes`: (step, dp_rank) that lack a whole stage.
    """

    layout: Layout
    steps: Int32s
    blocks: tuple[Block, ...]
    dropped_lanes: tuple[tuple[int, int], ...]

    @classmethod
    def from_trace(cls, trace: Trace) -> DependencyGraph:
        """Build the graph. Raises GraphError for unpaired sends, cycles and the like."""
        lanes = place_lanes(trace)
        blocks = tuple(_blocks(lanes.groups, len(lanes.steps)))
        replayed = np.unique(np.concatenate([block.step for block in blocks]))
        if len(replayed) < len(lanes.steps):
            blocks = tuple(_renumbered(block, replayed) for block in blocks)
        return cls(layout=trace.layout, steps=lanes.steps[replayed], blocks=blocks, dropped_lanes=lanes.dropped_lanes)

    @cached_property
    def ops(self) -> int:
        """How many ops are in the graph."""
        return sum(block.start.size for block in self.blocks)

    @cached_property
    def dp_ranks(self) -> tuple[int, ...]:
        """The DP ranks in the graph, ascending."""
        return tuple(np.unique(np.concatenate([block.dp_rank.ravel() for block in self.blocks])).tolist())

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """The workers in the graph, by DP rank, then stage."""
        return tuple(Worker(dp_rank, pp_rank) for dp_rank in self.dp_ranks for pp_rank in range(self.layout.pp))

    def to_networkx(self, step: int | None = None) -> networkx.DiGraph[Node]:
        """One step (by default the first) as a networkx graph, for people who explore.

        A node is (dp_rank, pp_rank, kind, seq), with `start` and `duration` (recorded seconds), `chunk`, `microbatch`
        and `group`: nodes of equal group transfer together. An edge leads from an op to one that waits for its end.
        Raises KeyError for a step that is not in the graph.
        """
        import networkx

        wanted = int(self.steps[0]) if step is None else step
        if wanted not in self.steps:
            raise KeyError(f"step {step} is not in the graph; it has {self.steps[0]} to {self.steps[-1]}")
        index = int(np.searchsorted(self.steps, wanted))
        graph: networkx.DiGraph[Node] = networkx.DiGraph(step=wanted)
        for number, block in enumerate(self.blocks):
            for lane in np.flatnonzero(block.step == index):
                _add_lane(graph, block, number, int(lane))
        return graph


def build_template(structures: Sequence[Structure], *, lanes_join: bool) -> Template:
    """One graph of several lanes' structures. Their data-parallel collectives join within the graph.

    `lanes_join`: they also join the other lanes of the step (which then share this template).
    Raises GraphError where the dependencies form a cycle.
    """
    sizes = np.array([len(structure.kind) for structure in structures])
    offsets = np.cumsum(sizes) - sizes
    before = np.concatenate([part.before + offset for part, offset in zip(structures, offsets, strict=True)])
    after = np.concatenate([part.after + offset for part, offset in zip(structures, offsets, strict=True)])
    group = np.concatenate([part.group + offset for part, offset in zip(structures, offsets, strict=True)])
    dp_key = np.concatenate([part.dp_key for part in structures])
    joined = np.flatnonzero(dp_key >= 0)
    if len(joined):  # a collective is one group over all members: name it after its first row
        _, first, inverse = np.unique(dp_key[joined], return_index=True, return_inverse=True)
        group[joined] = joined[first[inverse]]
    rows = len(group)
    _, group = np.unique(group, return_inverse=True)
    groups = int(group.max()) + 1
    by_group = np.argsort(group, kind="stable")
    first_of_group = np.searchsorted(group[by_group], np.arange(groups + 1))
    first_wait, waits_for = _adjacency(after, before, rows)
    first_next, nexts = _adjacency(before, after, rows)
    ordered = _replay_order(group, by_group, first_of_group, first_next, nexts, np.diff(first_wait))
    if len(ordered) < groups:
        raise _cycle(structures, offsets, np.setdiff1d(np.arange(groups), ordered), by_group, first_of_group)
    lengths = np.diff(first_of_group)[ordered]
    order_first = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(rows) - np.repeat(order_first[:-1], lengths) + np.repeat(first_of_group[ordered], lengths)
    order = by_group[positions]
    slot, slots = _assign_slots(order, order_first, first_wait, waits_for)
    kind = np.concatenate([part.kind for part in structures])
    joins = np.zeros(groups, np.bool_)
    if lanes_join:
        joins[group[joined]] = True
    return Template(
        member=np.repeat(np.arange(len(structures), dtype=np.int32), sizes),
        pp_rank=np.concatenate([part.pp_rank for part in structures]),
        kind=kind,
        seq=np.concatenate([part.seq for part in structures]),
        chunk=np.concatenate([part.chunk for part in structures]),
        is_communication=_IS_COMMUNICATION[kind],
        first_wait=first_wait,
        waits_for=waits_for,
        order=order,
        first_of_group=order_first,
        joins_lanes=joins[ordered],
        slot=slot,
        slots=int(slots),
    )


def first_lanes(step: Int32s) -> Ints:
    """Where the lanes of each step begin, [steps + 1], from the ascending step of each lane."""
    return np.concatenate([[0], np.flatnonzero(np.diff(step)) + 1, [len(step)]])


def _blocks(groups: Sequence[LaneGroup], steps: int) -> Iterator[Block]:
    """One block per structure; steps whose lanes differ are set apart, one block per combination of structures."""
    structures_of_step = np.zeros(steps, np.int64)
    for group in groups:
        structures_of_step[np.unique(group.step)] += 1
    mixed = structures_of_step > 1
    for group in groups:
        lanes = np.flatnonzero(~mixed[group.step])
        if len(lanes):
            yield _uniform_block(group, lanes)
    if mixed.any():
        yield from _mixed_blocks(groups, np.flatnonzero(mixed))


def _uniform_block(group: LaneGroup, lanes: Ints) -> Block:
    everything = len(lanes) == len(group.step)
    step = group.step[lanes]
    first_lane = first_lanes(step)
    microbatch = group.microbatch
    return Block(
        template=build_template([group.structure], lanes_join=len(first_lane) - 1 < len(step)),
        structures=(group.structure,),
        step=step,
        first_lane=first_lane,
        dp_rank=group.dp_rank[lanes].reshape(1, -1),
        start=group.start if everything else np.ascontiguousarray(group.start[:, lanes]),
        duration=group.duration if everything else np.ascontiguousarray(group.duration[:, lanes]),
        microbatch=microbatch if everything or microbatch.shape[1] == 1 else microbatch[:, lanes],
    )


def _mixed_blocks(groups: Sequence[LaneGroup], mixed: Ints) -> Iterator[Block]:
    """Whole steps as lanes; steps with the same structure on the same DP ranks share a block."""
    lanes_of_step: dict[int, list[tuple[int, int, int]]] = {int(step): [] for step in mixed}
    for number, group in enumerate(groups):
        for lane in np.flatnonzero(np.isin(group.step, mixed)):
            lanes_of_step[int(group.step[lane])].append((int(group.dp_rank[lane]), number, int(lane)))
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for step, lanes in lanes_of_step.items():
        lanes.sort()
        alike.setdefault(tuple((dp_rank, number) for dp_rank, number, _ in lanes), []).append(step)
    for members, steps in alike.items():
        structures = tuple(groups[number].structure for _, number in members)
        sizes = [len(structure.kind) for structure in structures]

        def stacked(name: str, members: tuple[tuple[int, int], ...] = members, steps: list[int] = steps) -> Floats:
            """The members' rows under each other, one lane per step."""
            parts = []
            for member, (_, number) in enumerate(members):
                matrix = getattr(groups[number], name)
                lanes = [lanes_of_step[step][member][2] for step in steps]
                parts.append(matrix[:, lanes] if matrix.shape[1] > 1 else np.repeat(matrix, len(steps), axis=1))
            return np.concatenate(parts)

        yield Block(
            template=build_template(structures, lanes_join=False),
            structures=structures,
            step=np.array(steps, np.int32),
            first_lane=np.arange(len(steps) + 1),
            dp_rank=np.repeat(np.array([dp_rank for dp_rank, _ in members], np.int32), sizes).reshape(-1, 1),
            start=stacked("start"),
            duration=stacked("duration"),
            microbatch=stacked("microbatch").astype(np.int32),
        )


def _renumbered(block: Block, steps: Ints) -> Block:
    return replace(block, step=np.searchsorted(steps, block.step).astype(np.int32))


def _add_lane(graph: networkx.DiGraph[Node], block: Block, number: int, lane: int) -> None:
    template = block.template
    dp_rank = np.broadcast_to(block.dp_rank, block.start.shape)[:, lane]
    microbatch = block.microbatch[:, lane if block.microbatch.shape[1] > 1 else 0]
    group_of_row = np.empty(template.rows, np.int64)
    group_of_row[template.order] = np.repeat(np.arange(len(template.joins_lanes)), np.diff(template.first_of_group))
    nodes = [
        (int(dp_rank[row]), int(template.pp_rank[row]), KINDS[template.kind[row]], int(template.seq[row]))
        for row in range(template.rows)
    ]
    for row, node in enumerate(nodes):
        group = int(group_of_row[row])
        graph.add_node(
            node,
            start=float(block.start[row, lane]),
            duration=float(block.duration[row, lane]),
            chunk=int(template.chunk[row]) if template.chunk[row] >= 0 else None,
            microbatch=int(microbatch[row]) if microbatch[row] >= 0 else None,
            group=(number, group) if template.joins_lanes[group] else (number, group, lane),
        )
    for row, node in enumerate(nodes):
        for before in template.waits_for[template.first_wait[row] : template.first_wait[row + 1]]:
            graph.add_edge(nodes[before], node)


def _adjacency(sources: Ints, targets: Ints, rows: int) -> tuple[Ints, Ints]:
    """Edges grouped by source: where each row's targets begin, [rows + 1], and the targets, [edges]."""
    order = np.argsort(sources, kind="stable")
    return np.searchsorted(sources[order], np.arange(rows + 1)), targets[order]


def _cycle(
    structures: Sequence[Structure], offsets: Ints, stuck: Ints, by_group: Ints, first_of_group: Ints
) -> GraphError:
    row = int(by_group[first_of_group[stuck[0]]])
    member = int(np.searchsorted(offsets, row, side="right")) - 1
    part, at = structures[member], row - int(offsets[member])
    return GraphError(
        f"the dependencies form a cycle: {KINDS[part.kind[at]]} {part.seq[at]} of stage {part.pp_rank[at]} and"
        f" {len(stuck) - 1} more ops wait for each other; sends and recvs were recorded in an order that cannot run"
    )


@nb.njit(cache=True, nogil=True)
def _replay_order(group, by_group, first_of_group, first_next, nexts, waits):  # type: ignore[no-untyped-def]
    """Groups in an order in which each comes after all it waits for; shorter than the groups where a cycle is."""
    groups = len(first_of_group) - 1
    open_waits = np.zeros(groups, np.int64)
    for row in range(len(group)):
        open_waits[group[row]] += waits[row]
    ordered = np.empty(groups, np.int64)
    count = 0
    for number in range(groups):
        if open_waits[number] == 0:
            ordered[count] = number
            count += 1
    done = 0
    while done < count:
        number = ordered[done]
        done += 1
        for at in range(first_of_group[number], first_of_group[number + 1]):
            row = by_group[at]
            for edge in range(first_next[row], first_next[row + 1]):
                after = group[nexts[edge]]
                open_waits[after] -= 1
                if open_waits[after] == 0:
                    ordered[count] = after
                    count += 1
    return ordered[:count]


@nb.njit(cache=True, nogil=True)
def _assign_slots(order, first_of_group, first_wait, waits_for):  # type: ignore[no-untyped-def]
    """A slot per row, reused once nothing later waits for the row, so that live end times stay in cache."""
    rows = len(order)
    last_use = np.full(rows, -1, np.int64)
    groups = len(first_of_group) - 1
    for number in range(groups):
        for at in range(first_of_group[number], first_of_group[number + 1]):
            row = order[at]
            last_use[row] = number
            for wait in range(first_wait[row], first_wait[row + 1]):
                last_use[waits_for[wait]] = number
    slot = np.full(rows, -1, np.int64)
    free = np.empty(rows, np.int64)
    released = np.zeros(rows, np.bool_)
    free_count = 0
    slots = 0
    for number in range(groups):
        for at in range(first_of_group[number], first_of_group[number + 1]):
            if free_count > 0:
                free_count -= 1
                slot[order[at]] = free[free_count]
            else:
                slot[order[at]] = slots
                slots += 1
        for at in range(first_of_group[number], first_of_group[number + 1]):
            row = order[at]
            if last_use[row] == number and not released[row]:
                released[row] = True
                free[free_count] = slot[row]
                free_count += 1
            for wait in range(first_wait[row], first_wait[row + 1]):
                before = waits_for[wait]
                if last_use[before] == number and not released[before]:
                    released[before] = True
                    free[free_count] = slot[before]
                    free_count += 1
    return slot, slots
