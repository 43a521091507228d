"""The op graph: any job as ops, process groups and dependencies, stated rather than derived.

In: a frame of ops (one row per op) and a frame of edges. Out: an `OpGraph`, validated once, and from it a
`FoldedGraph`, laid out for replay: steps with the same ops and dependencies share a template. It does not depend on
pipeline or data parallelism: ops have labels, ranks have coordinates on named axes, and a collective is one
*rendezvous* of the ranks of one process group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.graph.compiled import (
    NO_RENDEZVOUS,
    UNLABELLED,
    CompiledGraph,
    Label,
    Mask,
    Wiring,
    compile_graphs,
    unknown_label,
)
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints, numbered
from tracekit.base.errors import GraphError, TraceError, extra
from tracekit.base.text import listed, quoted
from tracekit.trace.facts import MissingMembers
from tracekit.trace.model import LATEST_S, LONGEST_S, ProcessGroup

if TYPE_CHECKING:
    import networkx

#: Columns with a meaning of their own; every other column is a label.
OP_COLUMNS = ("step", "rank", "stream", "start", "duration", "peer", "rendezvous", "comparable")
#: A label with more values than this is an identifier, and a report by it would be unreadable.
MOST_VALUES = 100_000


class Why(IntEnum):
    """Reasons why one op waits for another."""

    RULE = 0  #: a rule of the front end, or not stated
    STREAM = 1  #: the stream runs one op after the other
    LAUNCH = 2  #: the host launches it
    EVENT = 3  #: an event, or a synchronisation of host and device
    INFERRED = 4  #: an event that was not recorded, inferred from the order of calls


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """The position of each rank: `axes`, such as dp_rank and pp_rank, with their sizes; `coordinates`, [ranks, axes].

    `ranks`: the recorded ranks, ascending, [ranks].
    """

    ranks: Int32s
    axes: Mapping[str, int]
    coordinates: Int32s


@dataclass(frozen=True, eq=False)
class OpGraph:
    """Ops in the order of step, then of the frame, [ops] each, and their dependencies.

    `step`, `rank`: numbers. `start`, `duration`: seconds; starts count from the step's start. `peer`: index into
    `peer_names`; ops of equal class are comparable. An op whose `comparable` is false has no peers; its ideal is its
    own cost. `rendezvous`: ops that start together share a number, and their cost counts from the arrival of the last
    of them; -1 for an op without one. `labels`: codes are [ops]. `before`, `after`, `why`: edges, [edges]; an op starts
    when everything that it waits for has ended.
    """

    step: Int32s
    rank: Int32s
    start: Floats
    duration: Floats
    peer: Int32s
    peer_names: tuple[str, ...]
    rendezvous: Ints
    labels: Mapping[str, Label]
    before: Int32s
    after: Int32s
    why: npt.NDArray[np.uint8]
    mesh: Mesh
    gaps: tuple[MissingMembers, ...] = ()
    comparable: Bools | None = None

    @classmethod
    def from_frames(
        cls, ops: pl.DataFrame, edges: pl.DataFrame, *, axes: Sequence[str] = (), groups: Sequence[ProcessGroup] = ()
    ) -> OpGraph:
        """Validate two frames and build the graph.

        `ops`: `rank`, `start`, `duration`; optional: `step` (default 0), `stream`, `peer` (default: `kind`, else
        `name`), `comparable` (default true), `rendezvous` (null for none), `group` (name of the process group of a
        rendezvous) and labels. `edges`: `before` and `after`, row numbers of `ops`, and `why` (default: rule). `axes`:
        labels that are coordinates of ranks. `groups`: the members of each named process group; members that were not
        recorded become `gaps`.

        Raises TraceError for an invalid value, GraphError if ops contradict each other; both name the ops.
        """
        return _Reader(ops, edges).graph(axes, groups)

    @cached_property
    def steps(self) -> Int32s:
        """The step numbers, ascending."""
        return np.unique(self.step)

    def describe(self, op: int) -> str:
        """The name of an op in messages."""
        named = next((name for name in ("name", "kind") if name in self.labels), None)
        name = self.peer_names[self.peer[op]]
        if named is not None and self.labels[named].codes[op] != UNLABELLED:
            name = str(self.labels[named].value(int(self.labels[named].codes[op])))
        return f"{name} of rank {self.rank[op]} at {self.start[op]:.6g} s of step {self.step[op]}"

    def to_networkx(self) -> networkx.DiGraph[int]:
        """The graph in networkx, for exploration: a node per op with all labels, edges with `why`."""
        with extra("networkx", "a graph for networkx"):
            import networkx

        graph: networkx.DiGraph[int] = networkx.DiGraph()
        for op in range(len(self.start)):
            labels = {
                name: label.value(int(label.codes[op]))
                for name, label in self.labels.items()
                if label.codes[op] != UNLABELLED
            }
            graph.add_node(
                op,
                **labels,
                step=int(self.step[op]),
                rank=int(self.rank[op]),
                start=float(self.start[op]),
                duration=float(self.duration[op]),
                peer=self.peer_names[self.peer[op]],
                rendezvous=int(self.rendezvous[op]) if self.rendezvous[op] >= 0 else None,
            )
        for before, after, why in zip(self.before.tolist(), self.after.tolist(), self.why.tolist(), strict=True):
            graph.add_edge(before, after, why=Why(why).name.lower())
        return graph


def require_columns(frame: pl.DataFrame, names: Sequence[str], what: str) -> None:
    """Raise TraceError if a column is missing. `what`: the name of the frame in the message."""
    if missing := [name for name in names if name not in frame.columns]:
        columns = listed(frame.columns) or "none"
        raise TraceError(f"{what}: column {quoted(missing[0])} is missing; found {columns}")


class _Reader:
    """Validates the frames of an op graph."""

    def __init__(self, ops: pl.DataFrame, edges: pl.DataFrame) -> None:
        require_columns(ops, ("rank", "start", "duration"), "ops")
        require_columns(edges, ("before", "after"), "edges")
        if not ops.height:
            raise TraceError("ops: no ops (0 rows); record at least one step")
        self.ops, self.edges = ops, edges

    def graph(self, axes: Sequence[str], groups: Sequence[ProcessGroup]) -> OpGraph:
        for group in groups:
            if len(set(group.ranks)) < len(group.ranks) or not all(
                0 <= rank <= np.iinfo(np.int32).max for rank in group.ranks
            ):
                raise TraceError(
                    f"groups: {group.name!r:.40} has ranks {group.ranks!s:.60}; expected each once, from 0 on"
                )
        step = self.integers("step") if "step" in self.ops.columns else np.zeros(self.ops.height, np.int32)
        before, after, why = self.edge_columns()
        order: Ints | slice = slice(None)  # no copy of columns in the order of step
        if (step[1:] < step[:-1]).any():
            order = np.argsort(step, kind="stable")
            place = np.empty(len(order), np.int32)
            place[order] = np.arange(len(order))
            before, after = place[before], place[after]
        named = next((name for name in ("peer", "kind", "name") if name in self.ops.columns), None)
        if named is None:
            raise TraceError("ops: no column says which ops are comparable; add a column 'peer', 'kind' or 'name'")
        if self.ops[named].null_count():
            row = int(self.ops[named].is_null().arg_max() or 0)
            raise TraceError(f"ops: column {named!r}, row {row}: null; every op needs a class of comparable ops")
        peer = self.label(named)
        if peer.names is None:
            peer = Label(*_numbered(self.text(named)))
        labels = {name: self.label(name) for name in self.ops.columns if name not in OP_COLUMNS or name == "stream"}
        rank, comparable = self.integers("rank"), self.comparable()
        graph = OpGraph(
            step=step[order],
            rank=rank[order],
            start=self.seconds("start")[order],
            duration=self.seconds("duration")[order],
            peer=peer.codes[order],
            peer_names=peer.names or (),
            rendezvous=self.rendezvous()[order],
            labels={name: Label(label.codes[order], label.names) for name, label in labels.items()},
            before=before,
            after=after,
            why=why,
            mesh=self.mesh(rank, axes),
            comparable=None if comparable is None else comparable[order],
        )
        _check_edges(graph)
        return replace(graph, gaps=_check_rendezvous(graph, groups))

    def integers(self, name: str) -> Int32s:
        """A column of non-negative integers."""
        column = self.ops[name]
        if not column.dtype.is_integer():
            raise TraceError(f"ops: column {name!r} has type {column.dtype}; expected an integer; convert the column")
        invalid = column.is_null() | (column < 0) | (column > np.iinfo(np.int32).max)
        _refuse(f"ops: column {name!r}", column, invalid.to_numpy(), "expected an integer >= 0")
        return column.cast(pl.Int32).to_numpy()

    def seconds(self, name: str) -> Floats:
        """A column of finite seconds, none that only another unit explains; durations must not be negative."""
        column = self.ops[name]
        if not column.dtype.is_numeric():
            raise TraceError(f"ops: column {name!r} has type {column.dtype}; expected seconds; convert the column")
        values = column.cast(pl.Float64).fill_null(float("nan")).to_numpy()
        is_duration = name == "duration"
        least, most = (0.0, LONGEST_S) if is_duration else (-LATEST_S, LATEST_S)
        invalid = ~((values >= least) & (values <= most))
        first, expected = values[invalid.argmax()], f"finite seconds{' >= 0' if is_duration else ''}"
        if np.isfinite(first) and abs(first) > most:
            expected = f"at most {most:,.0f} seconds; convert the column"
        _refuse(f"ops: column {name!r}", column, invalid, f"expected {expected}")
        return np.ascontiguousarray(values)

    def label(self, name: str) -> Label:
        """A column as a label: integers as they are, anything else by name."""
        column = self.ops[name]
        if column.dtype.is_integer():
            invalid = ((column < 0) | (column > np.iinfo(np.int32).max)).fill_null(value=False)
            _refuse(f"ops: label {name!r}", column, invalid.to_numpy(), "expected an integer >= 0")
            return Label(column.cast(pl.Int32).fill_null(UNLABELLED).to_numpy())
        codes, names = _numbered(self.text(name))
        if len(names) > MOST_VALUES:
            raise TraceError(
                f"ops: label {name!r} has {len(names)} values, more than {MOST_VALUES}: an identifier is not a label;"
                " leave the column out"
            )
        return Label(codes, names)

    def rendezvous(self) -> Ints:
        """The number of the rendezvous of each op; ops that start together share one; -1 for none."""
        if "rendezvous" not in self.ops.columns:
            return np.full(self.ops.height, -1, np.int64)
        column = self.ops["rendezvous"]
        if column.dtype.is_float():  # integers with gaps, of pandas
            strange = ~(column.is_finite() & (column == column.round())).fill_null(value=True)
            if strange.any():
                row = int(strange.arg_max() or 0)
                raise TraceError(f"ops: column 'rendezvous', row {row}: {column[row]}; expected integers or strings")
            column = column.cast(pl.Int64)
        if column.dtype.is_integer():
            whole = column.cast(pl.Int64, strict=False)  # null for what is larger
            if (whole.fill_null(-1).ge(0) | column.is_null()).all():
                return whole.fill_null(-1).to_numpy()
        names = column.cast(pl.String) if column.dtype.is_integer() else self.text("rendezvous")  # signed hashes, too
        codes, _ = _numbered(names)
        return codes.astype(np.int64)

    def comparable(self) -> Bools | None:
        """Mask of the ops that have peers; None if all have."""
        if "comparable" not in self.ops.columns:
            return None
        column = self.ops["comparable"]
        if column.dtype != pl.Boolean or column.null_count():
            raise TraceError(f"ops: column 'comparable' has type {column.dtype}, or nulls; expected true or false")
        return column.to_numpy()

    def text(self, name: str) -> pl.Series:
        """A column of strings, as they are or as categories."""
        column = self.ops[name]
        try:
            return column if column.dtype == pl.Categorical else column.cast(pl.String)
        except pl.exceptions.PolarsError:
            raise TraceError(
                f"ops: column {name!r} has type {self.ops[name].dtype}; expected integers or strings"
            ) from None

    def edge_columns(self) -> tuple[Int32s, Int32s, npt.NDArray[np.uint8]]:
        """before, after, why."""
        ends = []
        for name in ("before", "after"):
            column = self.edges[name]
            if not column.dtype.is_integer() and self.edges.height:
                raise TraceError(f"edges: column {name!r} has type {column.dtype}; expected row numbers of the ops")
            rows = column.cast(pl.Int64).fill_null(-1).to_numpy()
            invalid = (rows < 0) | (rows >= self.ops.height)
            _refuse(f"edges: column {name!r}", column, invalid, f"the ops have rows 0 to {self.ops.height - 1}")
            ends.append(rows.astype(np.int32))
        if "why" not in self.edges.columns:
            return ends[0], ends[1], np.zeros(self.edges.height, np.uint8)
        reasons = {why.name.lower(): int(why) for why in Why}
        names = self.edges["why"].cast(pl.Categorical).fill_null("rule")
        if unknown := sorted(set(names.unique()) - set(reasons)):
            raise TraceError(f"edges: why {unknown[0]!r:.40} is unknown; expected one of {', '.join(reasons)}")
        return ends[0], ends[1], names.replace_strict(reasons, return_dtype=pl.UInt8).to_numpy()

    def mesh(self, rank: Int32s, axes: Sequence[str]) -> Mesh:
        """The coordinates of each rank. Raises TraceError if a rank has two different ones."""
        ranks, first, inverse = np.unique(rank, return_index=True, return_inverse=True)
        coordinates = np.zeros((len(ranks), len(axes)), np.int32)
        for number, axis in enumerate(axes):
            if axis not in self.ops.columns:
                raise TraceError(f"ops: axis {axis!r} is not a column; the columns are {listed(self.ops.columns)}")
            values = self.integers(axis)
            coordinates[:, number] = values[first]
            differs = values != coordinates[inverse, number]
            if differs.any():
                row = int(differs.argmax())
                raise TraceError(
                    f"ops: rank {rank[row]} has {axis} {values[row]} in row {row} and"
                    f" {coordinates[inverse[row], number]} before; a rank has one place"
                )
        sizes = {axis: int(coordinates[:, number].max()) + 1 for number, axis in enumerate(axes)}
        return Mesh(ranks, sizes, coordinates)


def _refuse(subject: str, column: pl.Series, invalid: Bools, expected: str) -> None:
    """Raise TraceError for the first `invalid` value of a column, if there is any."""
    if invalid.any():
        row = int(invalid.argmax())
        raise TraceError(f"{subject}, row {row}: {quoted(column[row])}; {expected}")


def _numbered(column: pl.Series) -> tuple[Int32s, tuple[str, ...]]:
    """Codes of the values, UNLABELLED for null, and the values in order of first appearance."""
    number = numbered(column)
    first = np.full(int(number.max(initial=-1)) + 1, len(number))
    first[number[::-1]] = np.arange(len(number))[::-1]  # with repeated indices, the last assignment wins
    null = column.is_null().to_numpy()[first] if column.null_count() else np.zeros(len(first), np.bool_)
    order = np.argsort(np.where(null, len(number), first), kind="stable")
    code = np.empty(len(first), np.int32)
    code[order] = np.arange(len(first))
    code[null] = UNLABELLED
    return code[number], tuple(column.gather(first[order[: len(first) - int(null.sum())]]).to_list())


def _check_edges(graph: OpGraph) -> None:
    """Raise GraphError for an edge between steps: each step is replayed from its own start."""
    crosses = graph.step[graph.before] != graph.step[graph.after]
    if crosses.any():
        first = int(crosses.argmax())
        raise GraphError(
            f"{graph.describe(int(graph.after[first]))} waits for {graph.describe(int(graph.before[first]))}: an edge"
            " leads from one step into another; number them as one step"
        )


def _check_rendezvous(graph: OpGraph, groups: Sequence[ProcessGroup]) -> tuple[MissingMembers, ...]:
    """Members that were not recorded. Raises GraphError if ops claim the same place, or a rendezvous mixes steps or
    groups.
    """
    members = np.flatnonzero(graph.rendezvous >= 0)
    members = members[np.lexsort((graph.rank[members], graph.rendezvous[members]))]
    number, rank = graph.rendezvous[members], graph.rank[members]
    group = graph.labels["group"].codes[members] if groups and "group" in graph.labels else np.zeros(len(members))
    same = number[1:] == number[:-1]
    for differs, what in (
        (same & (rank[1:] == rank[:-1]), "both claim rendezvous {0} for their rank; each rank has one op in it"),
        (same & (graph.step[members[1:]] != graph.step[members[:-1]]), "share rendezvous {0} but are in two steps"),
        (same & (group[1:] != group[:-1]), "share rendezvous {0} but are of two groups"),
    ):
        if differs.any():
            first = int(differs.argmax())
            pair = f"{graph.describe(int(members[first]))} and {graph.describe(int(members[first + 1]))}"
            raise GraphError(f"{pair} {what.format(number[first])}")
    return _members_not_recorded(graph, groups, members) if groups and len(members) else ()


def _members_not_recorded(graph: OpGraph, groups: Sequence[ProcessGroup], members: Ints) -> tuple[MissingMembers, ...]:
    """The ranks of each rendezvous' group that have no op in it. `members`: ops by rendezvous, then rank.

    Raises TraceError if no group is named, GraphError for an unknown group and for ranks outside it.
    """
    if "group" not in graph.labels:
        raise TraceError("ops: process groups are given, but no column 'group' names the group of each rendezvous")
    label, by_name = graph.labels["group"], {group.name: group for group in groups}
    used = {int(code): str(label.value(int(code))) for code in np.unique(label.codes[members]) if code != UNLABELLED}
    number, rank, code = graph.rendezvous[members], graph.rank[members], label.codes[members]
    strange = ~np.isin(code, [group_code for group_code, name in used.items() if name in by_name])
    if strange.any():
        index = int(strange.argmax())
        name = used.get(int(code[index]), "")
        raise GraphError(f"{graph.describe(int(members[index]))}: its group {name!r:.40} is not among the groups")
    width = 1 + max(int(rank.max()), *(max(group.ranks, default=0) for group in groups))
    allowed = [group_code * width + member for group_code, name in used.items() for member in by_name[name].ranks]
    outside = ~np.isin(code.astype(np.int64) * width + rank, allowed)
    if outside.any():
        index = int(outside.argmax())
        name = used[int(code[index])]
        raise GraphError(f"{graph.describe(int(members[index]))}: rank {rank[index]} is not a member of group {name!r}")
    _, first, counts = np.unique(number, return_index=True, return_counts=True)
    sizes = np.zeros(1 + max(used), np.int64)
    for group_code, name in used.items():
        sizes[group_code] = len(by_name[name].ranks)
    gaps = []
    for begin, count in zip(first.tolist(), counts.tolist(), strict=True):
        if count < sizes[code[begin]]:
            name = used[int(code[begin])]
            missing = sorted(set(by_name[name].ranks) - set(rank[begin : begin + count].tolist()))
            gaps.append(MissingMembers(int(number[begin]), name, tuple(missing)))
    return tuple(gaps)


@dataclass(frozen=True, slots=True, eq=False)
class FoldedSteps:
    """Steps with the same ops and dependencies: a row per op in replay order, a lane per step.

    `op`: the op in each cell, [rows, lanes]. The other fields: as in `labels.LabelledBlock`.
    """

    template: CompiledGraph
    step: Int32s
    first_lane: Ints
    start: Floats
    duration: Floats
    op: Ints
    present: Mask | None = None


@dataclass(frozen=True, eq=False)
class FoldedGraph:
    """An op graph, laid out for replay."""

    ops: OpGraph
    steps: Int32s
    blocks: tuple[FoldedSteps, ...]
    rendezvous_count: int = 0
    blocks_meet: bool = False

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels that ops of this job have."""
        return tuple(dict.fromkeys(("step", "rank", "peer", *self.ops.labels)))

    def of_ops(self, matrices: Sequence[Floats], ops: Ints | None = None) -> Floats:
        """The values of matrices, one [rows, lanes] per block, by op, [ops]; only those of some `ops`."""
        cells = matrices[0].ravel() if len(matrices) == 1 else np.concatenate([matrix.ravel() for matrix in matrices])
        return cells.take(self._cell if ops is None else self._cell[ops])

    @cached_property
    def _cell(self) -> Ints:
        """Where each op is in the concatenated cells of all blocks, [ops]."""
        cells = np.empty(len(self.ops.start), np.int64)
        cells[np.concatenate([block.op.ravel() for block in self.blocks])] = np.arange(len(cells))
        return cells

    def label(self, number: int, name: str) -> Label:
        """A label of the ops of block `number`. Raises SelectionError, with the labels that exist, if there is none."""
        block, ops = self.blocks[number], self.ops
        if name == "step":
            return Label(self.steps[block.step].reshape(1, -1))
        if name == "rank":
            return Label(ops.rank[block.op[:, :1]])
        if name == "peer":
            return Label(ops.peer[block.op[:, :1]], ops.peer_names)
        if name not in ops.labels:
            raise unknown_label(name, self.label_names)
        label = ops.labels[name]
        codes = label.codes[block.op]
        return Label(codes[:, :1] if (codes == codes[:, :1]).all() else codes, label.names)


def fold(graph: OpGraph) -> FoldedGraph:
    """Lay out `graph` for replay. Raises GraphError if dependencies form a cycle.

    Equal steps become lanes of one template. If no two steps are alike, each is a template with one lane; only speed
    depends on folding.
    """
    alike: dict[bytes, list[_Step]] = {}
    for step in _steps(graph):
        alike.setdefault(step.signature(graph), []).append(step)
    blocks = tuple(_block(graph, steps) for steps in alike.values())
    return FoldedGraph(graph, graph.steps, blocks)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One step: its index, its ops, and the dependencies among them, numbered from 0."""

    number: int
    first: int
    last: int
    before: Int32s
    after: Int32s
    group: Int32s

    def signature(self, graph: OpGraph) -> bytes:
        """Equal for steps that fold: the same ranks, comparable ops, and dependencies."""
        span = slice(self.first, self.last)
        parts = (graph.rank[span], graph.peer[span], self.group, graph.rendezvous[span] >= 0, self.before, self.after)
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(part).data)
        return digest.digest()


def _steps(graph: OpGraph) -> Iterator[_Step]:
    """Each step with its own edges, in canonical order."""
    first_op = np.searchsorted(graph.step, graph.steps)
    bounds = [*first_op.tolist(), len(graph.step)]
    order = np.lexsort((graph.before, graph.after))
    before, after = graph.before[order], graph.after[order]
    first_edge = np.searchsorted(after, bounds)
    for number in range(len(graph.steps)):
        first, last = bounds[number], bounds[number + 1]
        edges = slice(first_edge[number], first_edge[number + 1])
        yield _Step(
            number, first, last, before[edges] - first, after[edges] - first, _groups(graph.rendezvous[first:last])
        )


def _groups(rendezvous: Ints) -> Int32s:
    """A group per op: the first op of its rendezvous, else itself."""
    group = np.arange(len(rendezvous), dtype=np.int32)
    members = np.flatnonzero(rendezvous >= 0)
    _, first, inverse = np.unique(rendezvous[members], return_index=True, return_inverse=True)
    group[members] = members[first[inverse]]
    return group


def _block(graph: OpGraph, steps: list[_Step]) -> FoldedSteps:
    sample = steps[0]
    rows = sample.last - sample.first
    wiring = Wiring(
        before=sample.before,
        after=sample.after,
        group=sample.group,
        rendezvous_key=np.full(rows, -1, np.int64),
        synchronises=graph.rendezvous[sample.first : sample.last] >= 0,
        describe=lambda row: graph.describe(sample.first + row),
    )
    (template,) = compile_graphs([wiring], NO_RENDEZVOUS)
    op = template.order[:, None] + np.array([step.first for step in steps])
    return FoldedSteps(
        template=template.in_replay_order(),
        step=np.array([step.number for step in steps], np.int32),
        first_lane=np.arange(len(steps) + 1),
        start=graph.start[op],
        duration=graph.duration[op],
        op=op,
    )
