"""The dependency graph of a pipeline job: templates, and the lanes that each template covers.

In: a `Trace`. Out: a `DependencyGraph`. Almost every job repeats one structure on every DP rank and step. So a template
is the compiled graph of one lane and the identity of its ops, and a block holds [rows, lanes] matrices of recorded
times. A job with different lanes has a block for each structure; lanes of one step join across blocks. Ops that only
some lanes have do not make a separate structure: a block records which ops are present.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph import PostingRule
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
from tracekit.analysis.graph.lanes import (
    JobLanes,
    LaneGroup,
    Lanes,
    StructureKey,
    by_key,
    lanes_here,
    merged_lanes,
    merged_samples,
    place_lanes,
)
from tracekit.analysis.graph.megatron import Structure
from tracekit.analysis.graph.posting import (
    PUBLISHED,
    RECORDED,
    gathers_first,
    infer_posting,
    with_gathering_among_work,
    with_gathers_first,
    with_host_order,
    with_posting,
)
from tracekit.analysis.graph.unrecorded import Gap, gaps_of, with_missing_ops
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.numeric.parallel import UNDIVIDED, Whole
from tracekit.base.errors import GraphError, extra
from tracekit.trace.canonical import Trace
from tracekit.trace.model import COMMUNICATION, KINDS, Layout, OpKind

if TYPE_CHECKING:
    import networkx

_LABELS = ("kind", "stage", "chunk", "dp_rank", "step", "microbatch")
_SYNONYMS = {"pp_rank": "stage", "dp": "dp_rank", "steps": "step"}
_KIND_NAMES = tuple(str(kind) for kind in KINDS)
#: (dp_rank, pp_rank, kind, seq)
Node = tuple[int, int, OpKind, int]

_IS_COMMUNICATION = np.array([kind in COMMUNICATION for kind in KINDS])


class Block(LaneGroup, frozen=True, eq=False, kw_only=True):
    """A template and the lanes that it covers, ordered by (step, dp_rank). `key`: of its structure in the job.

    `step`: index into `DependencyGraph.steps`. `first_lane`: where the lanes of each step begin, [steps here + 1]. The
    other fields: as in `PlacedLanes`; `posted` and `resumed` are None.
    """

    template: Template
    first_lane: Ints
    key: StructureKey

    @property
    def lanes(self) -> int:
        """The number of lanes in the block."""
        return int(self.start.shape[1])

    @property
    def occasional_rows(self) -> Mask:
        """Rows that are absent from some lanes, [rows]."""
        if self.present is None:
            return np.zeros(len(self.start), np.bool_)
        return np.logical_not(self.present.all(axis=1))

    def begins(self) -> Mask:
        """Ops that wait for no other, [rows, 1] if all lanes agree, else [rows, lanes]."""
        template = self.template
        first: Mask = np.equal(np.diff(template.first_wait), 0).reshape(-1, 1)
        if self.present is None or self.present[first[:, 0]].all():
            return first
        first = np.repeat(first, self.lanes, axis=1)
        absent = first & ~self.present
        for row in template.order:  # an op that follows only absent ones does not wait either
            waits = template.waits_for[template.first_wait[row] : template.first_wait[row + 1]]
            if len(waits) and absent[waits].any():
                first[row] = absent[waits].all(axis=0)
                absent[row] = first[row] & ~self.present[row]
        return first & self.present


class DependencyGraph(Struct, frozen=True, eq=False, dict=True):
    """All ops of a job and their dependencies.

    `steps`: numbers of the steps that can be replayed, [steps]. `rendezvous_count`: data-parallel collectives per step.
    `dropped_lanes`: (step, dp_rank) of lanes from which a whole stage is missing. `gaps`: members of collectives that
    were not recorded; `reconstructed`: they were added. `posting`: the rule by which receives are posted. `trace`: a
    summary of the trace, with its ranks and hosts. `rank_begin_s`: usual begin of a step on each worker, seconds after
    the last DP rank of its stage and so at most 0, [stages, dp_ranks]; None: they begin together. `begins_early`: some
    worker usually begins a step before others have ended the last one. `lanes`: those of the whole trace, without
    inferred rules. `inferred_transfers`: no transfer was recorded; each was inferred
    from the computes at its ends. `virtual`: the `virtual_stages` of the job. `job`: the lanes of the whole job, of
    which the trace may be some steps.
    """

    layout: Layout
    steps: Int32s
    blocks: tuple[Block, ...]
    rendezvous_count: int
    dropped_lanes: tuple[tuple[int, int], ...]
    virtual: Ints
    job: JobLanes
    gaps: tuple[Gap, ...] = ()
    reconstructed: bool = False
    posting: PostingRule = PUBLISHED
    trace: Trace | None = None
    rank_begin_s: Floats | None = None
    begins_early: bool = False
    lanes: Lanes | None = None
    inferred_transfers: bool = False

    @property
    def computes_differ(self) -> bool:
        """Whether some lanes have more forwards or backwards on a stage than others."""
        codes = [OpKind.FORWARD_COMPUTE.code, OpKind.BACKWARD_COMPUTE.code]
        return len({block.by_stage[:, codes].tobytes() for block in self.blocks}) > 1

    @classmethod
    def from_trace(
        cls,
        trace: Trace,
        *,
        reconstruct: bool = False,
        infer: bool = False,
        whole: Whole = UNDIVIDED,
        lanes: Lanes | None = None,
    ) -> DependencyGraph:
        """Build the graph. Raises GraphError for unpaired sends, cycles and other contradictions.

        `reconstruct`: add members of collectives that only their peers recorded; each begins as soon as everything that
        it waits for has ended. `infer`: follow the rules that the recording shows instead of those of the published
        method. `whole`: the job of which `trace` may be some steps. `lanes`: of the trace, if they are placed already.
        """
        lanes = lanes or place_lanes(trace, whole)
        if not reconstruct:
            return cls._of_lanes(trace, lanes, whole, infer=infer)
        filled = place_lanes(with_missing_ops(trace, lanes.missing), whole)
        graph = cls._of_lanes(trace, filled, whole, infer=infer)
        return replace(_begun_when_ready(graph, lanes.missing), gaps=gaps_of(lanes.missing), reconstructed=True)

    @classmethod
    def _of_lanes(cls, trace: Trace, lanes: Lanes, whole: Whole, *, infer: bool) -> DependencyGraph:
        job = whole.combined(lambda: lanes_here(lanes), merged_lanes)
        if infer:
            structures, rule = _posted(lanes, job, whole)
            try:
                return cls._built(trace, lanes, job, structures, rule)
            except GraphError:  # if the recorded order contradicts the other rules, keep the rules
                pass
        return cls._built(trace, lanes, job, job.structures, PUBLISHED)

    def as_published(self) -> DependencyGraph:
        """The graph of the same trace by the rules of the published method, which infers none."""
        assert self.lanes is not None, "a graph built from a trace"
        assert self.trace is not None, "a graph built from a trace"
        return DependencyGraph._built(self.trace, self.lanes, self.job, self.job.structures, PUBLISHED)

    @classmethod
    def _built(
        cls,
        trace: Trace,
        lanes: Lanes,
        job: JobLanes,
        structures: Mapping[StructureKey, Structure],
        posting: PostingRule,
    ) -> DependencyGraph:
        replayed = np.unique(np.concatenate([group.step for group in lanes.groups]))
        # Those of the whole job: rendezvous and rounds must not depend on the steps here.
        all_structures = list(structures.values())
        keys = rendezvous_keys(all_structures) if job.lanes_of_step.max() > 1 else NO_RENDEZVOUS
        templates = dict(zip(structures, build_templates(all_structures, keys), strict=True))
        return cls(
            layout=trace.layout,
            steps=lanes.steps[replayed],
            blocks=tuple(
                _block(replace(group, structure=structures[key]), templates[key], key, replayed)
                for key, group in by_key(lanes).items()
            ),
            rendezvous_count=len(keys),
            dropped_lanes=lanes.dropped_lanes,
            gaps=job.gaps,
            posting=posting,
            trace=trace.outline(),
            inferred_transfers=lanes.inferred_transfers,
            virtual=lanes.virtual,
            lanes=lanes,
            job=job,
        )

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels that ops of this job have."""
        return (*_LABELS, *self._worker_labels)

    def label(self, number: int, name: str) -> Label:
        """A label of the ops of block `number`. Raises SelectionError, with the labels that exist, if there is none."""
        block = self.blocks[number]
        template = block.template
        match _SYNONYMS.get(name, name):
            case "kind":
                return Label(template.kind.reshape(-1, 1), _KIND_NAMES)
            case "stage":
                return Label(template.pp_rank.reshape(-1, 1))
            case "chunk":
                return Label(template.chunk.reshape(-1, 1))
            case "dp_rank":
                return Label(block.dp_rank.reshape(1, -1))
            case "step":
                return Label(self.steps[block.step].reshape(1, -1))
            case "microbatch":
                return Label(block.microbatch)
            case _ if name in self._worker_labels:
                of_worker = self._worker_labels[name]
                return Label(of_worker.codes[self.dp_index(block)[None, :], template.pp_rank[:, None]], of_worker.names)
        raise unknown_label(name, self.label_names)

    @cached_property
    def _worker_labels(self) -> dict[str, Label]:
        """Labels of each worker, codes as [dp_ranks, stages]."""
        codes = np.full((len(self.dp_ranks), self.layout.pp), UNLABELLED, np.int32)
        if self.trace is None:
            return {}
        hosts, host_of = self.trace.hosts, codes.copy()
        names = tuple(sorted(set(hosts.values())))
        number = {name: code for code, name in enumerate(names)}
        row_of = {dp_rank: row for row, dp_rank in enumerate(self.dp_ranks)}
        for worker, rank in self.trace.worker_ranks().items():
            if (row := row_of.get(worker.dp_rank)) is not None:
                cell = row, worker.pp_rank
                codes[cell] = rank
                host_of[cell] = number.get(hosts.get(rank, ""), UNLABELLED)
        labels = {"rank": Label(codes)}
        return labels | {"host": Label(host_of, names)} if names else labels

    @cached_property
    def blocks_meet(self) -> bool:
        """True if a step has lanes of several structures, so that blocks must replay together."""
        blocks_of_step = sum(np.bincount(np.unique(block.step), minlength=len(self.steps)) for block in self.blocks)
        return bool(np.max(blocks_of_step) > 1)

    @cached_property
    def ops(self) -> int:
        """The number of ops in the graph."""
        return sum(block.ops for block in self.blocks)

    @cached_property
    def dp_ranks(self) -> tuple[int, ...]:
        """The DP ranks in the graph, ascending."""
        return tuple(np.unique(np.concatenate([block.dp_rank for block in self.blocks])).tolist())

    @cached_property
    def places_of_lanes(self) -> tuple[Ints | slice, ...]:
        """Where the lanes of each block are among all steps x dp_ranks, [lanes]; a slice if they are all in order."""
        places = [block.step * len(self.dp_ranks) + self.dp_index(block) for block in self.blocks]
        cells = np.arange(len(self.steps) * len(self.dp_ranks))
        return tuple(slice(None) if np.array_equal(place, cells) else place for place in places)

    def dp_index(self, block: Block) -> Ints:
        """The position in `dp_ranks` of each lane's DP rank, [lanes]."""
        return np.searchsorted(self.dp_ranks, block.dp_rank)

    def only_steps(self, positions: Ints) -> tuple[DependencyGraph, list[Ints]]:
        """The graph with only the steps at these positions, and the lanes of each block in them; it may have none."""
        blocks, lanes_of_blocks = [], []
        for block in self.blocks:
            lanes = np.flatnonzero(np.isin(block.step, positions))
            step = np.searchsorted(positions, block.step[lanes]).astype(np.int32)
            blocks.append(replace(block.only(lanes), step=step, first_lane=first_lanes(step)))
            lanes_of_blocks.append(lanes)
        graph = replace(self, steps=self.steps[positions], blocks=tuple(blocks))
        if self.rank_begin_s is not None:
            begin_s = self.rank_begin_s[:, np.searchsorted(self.dp_ranks, graph.dp_ranks)]
            graph = replace(graph, rank_begin_s=begin_s)
        return graph, lanes_of_blocks

    def rank_begins(self, block: Block, rows: Ints) -> Floats:
        """`rank_begin_s` of the ranks of these rows, [rows, lanes]."""
        assert self.rank_begin_s is not None, "checked by the caller"
        return self.rank_begin_s[block.template.pp_rank[rows][:, None], self.dp_index(block)]

    def to_networkx(self, step: int | None = None) -> networkx.DiGraph[Node]:
        """One step (by default the first) as a networkx graph, for exploration.

        A node is (dp_rank, pp_rank, kind, seq), with `start` and `duration` (recorded seconds), `chunk`, `microbatch`
        and `group`: nodes of equal group transfer together. An edge leads from an op to an op that waits for its end.
        Raises KeyError for a step that is not in the graph.
        """
        with extra("networkx", "a graph for networkx"):
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


def _posted(lanes: Lanes, job: JobLanes, whole: Whole) -> tuple[dict[StructureKey, Structure], PostingRule]:
    """The structures of the job with receives posted and parameters gathered as recorded, and the rule by which
    receives are posted.
    """
    recorded = whole.combined(lambda: job.samples_in(lanes), merged_samples)
    by_host = {key: by_host for key, sample in recorded.items() if (by_host := with_host_order(sample)) is not None}
    if len(by_host) == len(recorded):
        rule, structures = RECORDED, by_host
    else:
        rule = PUBLISHED if lanes.inferred_transfers else infer_posting(recorded.values())
        structures = {key: with_posting(sample, rule) for key, sample in recorded.items()}
    if gathers_first(recorded.values()):
        structures = {key: with_gathers_first(structure) for key, structure in structures.items()}
    return {key: with_gathering_among_work(structure, recorded[key]) for key, structure in structures.items()}, rule


def _block(group: LaneGroup, template: Template, key: StructureKey, replayed: Ints) -> Block:
    step = np.searchsorted(replayed, group.step).astype(np.int32)
    fields = {name: getattr(group, name) for name in group.__struct_fields__}
    changed = {"step": step, "first_lane": first_lanes(step), "posted": None, "resumed": None}
    return Block(**fields | changed, template=template, key=key)


def _begun_when_ready(graph: DependencyGraph, missing: pl.DataFrame) -> DependencyGraph:
    """The graph in which each missing op begins when everything it waits for has ended; its end stays."""
    step, dp_rank, pp_rank, kind, seq = (column.to_numpy() for column in missing.iter_columns())
    step_index = np.searchsorted(graph.steps, step)
    blocks = []
    for block in graph.blocks:
        template = block.template
        start, duration = block.start.copy(), block.duration.copy()
        # In replay order, because a missing op may wait for another one.
        for row in template.order[np.isin(template.kind[template.order], kind)]:
            same = (kind == template.kind[row]) & (pp_rank == template.pp_rank[row]) & (seq == template.seq[row])
            lanes = _lanes_at(block, step_index[same], dp_rank[same])
            waits = template.waits_for[template.first_wait[row] : template.first_wait[row + 1]]
            if not len(lanes) or not len(waits):
                continue
            end = start[row, lanes] + duration[row, lanes]
            ready = (start[np.ix_(waits, lanes)] + duration[np.ix_(waits, lanes)]).max(axis=0)
            start[row, lanes] = np.minimum(ready, end)
            duration[row, lanes] = end - start[row, lanes]
        blocks.append(replace(block, start=start, duration=duration))
    return replace(graph, blocks=tuple(blocks))


def _lanes_at(block: Block, step: Ints, dp_rank: Int32s) -> Ints:
    """The lanes of a block at these (step index, dp_rank), as far as the block has them."""
    width = int(max(block.dp_rank.max(), dp_rank.max(initial=0))) + 1
    lanes: Ints = np.flatnonzero(np.isin(block.step * width + block.dp_rank, step * width + dp_rank))
    return lanes


def first_lanes(step: Int32s) -> Ints:
    """Index of the first lane of each step, [steps + 1], given the ascending step of each lane."""
    return np.concatenate([[0], np.flatnonzero(np.diff(step)) + 1, [len(step)]])


def _add_lane(graph: networkx.DiGraph[Node], block: Block, number: int, lane: int) -> None:
    template = block.template
    dp_rank = int(block.dp_rank[lane])
    microbatch, seq = (column[:, lane if column.shape[1] > 1 else 0] for column in (block.microbatch, block.seq))
    present = np.ones(template.rows, np.bool_) if block.present is None else block.present[:, lane]
    group_of_row = np.empty(template.rows, np.int64)
    group_of_row[template.order] = np.repeat(np.arange(len(template.rendezvous)), np.diff(template.first_of_group))
    nodes = [
        (dp_rank, int(template.pp_rank[row]), KINDS[template.kind[row]], int(seq[row])) for row in range(template.rows)
    ]
    for row in np.flatnonzero(present).tolist():
        node, group = nodes[row], int(group_of_row[row])
        graph.add_node(
            node,
            start=float(block.start[row, lane]),
            duration=float(block.duration[row, lane]),
            chunk=int(template.chunk[row]) if template.chunk[row] >= 0 else None,
            microbatch=int(microbatch[row]) if microbatch[row] >= 0 else None,
            group=(int(template.rendezvous[group]),) if template.rendezvous[group] >= 0 else (number, group, lane),
        )
    for row in np.flatnonzero(present).tolist():
        waits = template.waits_for[template.first_wait[row] : template.first_wait[row + 1]].tolist()
        while waits:
            before = waits.pop()
            if present[before]:
                graph.add_edge(nodes[before], nodes[row])
            else:  # the ops that an absent op waits for
                waits += template.waits_for[template.first_wait[before] : template.first_wait[before + 1]].tolist()


class Template(CompiledGraph, frozen=True, eq=False):
    """A compiled graph and the identity of its rows, [rows] columns.

    `pp_rank`, `kind`, `seq`, `chunk`. Rows of several structures follow one another.
    """

    pp_rank: npt.NDArray[np.int16]
    kind: npt.NDArray[np.uint8]
    seq: Int32s
    chunk: npt.NDArray[np.int16]


def rendezvous_keys(structures: Sequence[Structure]) -> Ints:
    """The data-parallel collectives of a job: the distinct `Structure.dp_key`s, ascending."""
    keys = np.unique(np.concatenate([structure.dp_key for structure in structures]))
    return keys[keys >= 0]


def build_templates(structures: Sequence[Structure], keys: Ints) -> list[Template]:
    """A template per structure; data-parallel collectives (`keys`) join the lanes of a step across templates.

    Raises GraphError if dependencies form a cycle.
    """
    compiled = compile_graphs([_wiring([structure]) for structure in structures], keys)
    return [_template(graph, [structure]) for graph, structure in zip(compiled, structures, strict=True)]


def build_coupled_template(structures: Sequence[Structure]) -> Template:
    """One graph of several lanes of a step, whose data-parallel collectives join within it.

    Raises GraphError if dependencies form a cycle.
    """
    return _template(compile_graphs([_wiring(structures)], NO_RENDEZVOUS)[0], structures)


def _wiring(structures: Sequence[Structure]) -> Wiring:
    """The dependencies of several lanes, concatenated."""
    sizes = np.array([len(structure.kind) for structure in structures])
    offsets = np.cumsum(sizes) - sizes
    parts = list(zip(structures, offsets, strict=True))

    def describe(row: int) -> str:
        member = int(np.searchsorted(offsets, row, side="right")) - 1
        part, row_in_part = structures[member], row - int(offsets[member])
        return f"{KINDS[part.kind[row_in_part]]} {part.seq[row_in_part]} of stage {part.pp_rank[row_in_part]}"

    return Wiring(
        before=np.concatenate([part.before + offset for part, offset in parts]),
        after=np.concatenate([part.after + offset for part, offset in parts]),
        group=np.concatenate([part.group + offset for part, offset in parts]),
        rendezvous_key=np.concatenate([part.dp_key for part in structures]),
        synchronises=_IS_COMMUNICATION[np.concatenate([part.kind for part in structures])],
        describe=describe,
    )


def _template(graph: CompiledGraph, structures: Sequence[Structure]) -> Template:
    return Template(
        **{name: getattr(graph, name) for name in CompiledGraph.__struct_fields__},
        pp_rank=np.concatenate([part.pp_rank for part in structures]),
        kind=np.concatenate([part.kind for part in structures]),
        seq=np.concatenate([part.seq for part in structures]),
        chunk=np.concatenate([part.chunk for part in structures]),
    )
