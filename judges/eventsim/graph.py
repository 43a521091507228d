"""One step of a job as a graph: nodes, their dependencies, and the source of each node's time.

Builds a `StepGraph` from a `Job`, the same for every step. Work nodes take seconds (a compute, a launch by the host
thread, loading data), points take none (a receive is posted, a rank joins a collective), flows move bytes over the
network. Edges are the order of a stream, the order of the host thread, and data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from judges.eventsim.model import Cell, Host, Job, Posting, Shape
from judges.eventsim.schedule import Compute, Item, Transfer, program
from judges.eventsim.topology import Topology


class Source(IntEnum):
    """Source of a node's seconds: a table of `world.Seconds`, or none."""

    POINT = 0
    FLOW = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    DATA_LOAD = 5
    GC = 6
    CHECKPOINT = 7
    LAUNCH_FORWARD = 8
    LAUNCH_BACKWARD = 9
    LAUNCH = 10
    LAYERNORM = 11
    CLIP = 12


#: Nodes that stop while their process is stopped.
ON_THE_PROCESS = frozenset(Source) - {Source.POINT, Source.FLOW, Source.CLIP}
#: Recorded only if they took time.
OPTIONAL = frozenset({Source.DATA_LOAD, Source.GC, Source.CHECKPOINT})


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes over resources of the `Topology`. `number`: its place in the tables of the network's noise."""

    number: int
    size: float
    resources: tuple[int, ...]
    latency_s: float
    collective: bool
    link: int = -1


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """An op of the trace: it starts when `begin` starts and ends when `end` ends. `source`: of the node `begin`."""

    cell: Cell
    kind: str
    begin: int
    end: int
    microbatch: int | None
    chunk: int | None
    source: Source


@dataclass(frozen=True)
class StepGraph:
    """Nodes: `source`, `cell` (a number, -1: no worker) and `index` in the source's table; `after[n]` wait for n."""

    source: list[int]
    cell: list[int]
    index: list[int]
    waits: list[int]
    after: list[tuple[int, ...]]
    flows: dict[int, Flow]
    ops: tuple[RecordedOp, ...]
    last: dict[Cell, int]
    nodes_of: dict[Source, npt.NDArray[np.int64]] = field(default_factory=dict)
    index_of: dict[Source, npt.NDArray[np.int64]] = field(default_factory=dict)


def build(job: Job, *, gc_slots: bool, checkpoint_slots: bool, checkpoints_gathered: bool = False) -> StepGraph:
    """The graph of one step. Slots add a node before each forward (each step) that may take time.

    `checkpoints_gathered`: the checkpoint follows the launch of the gathering of parameters.
    """
    builder = _Builder(job, gc_slots=gc_slots, checkpoint_slots=checkpoint_slots)
    builder.checkpoints_gathered = checkpoints_gathered
    for cell in job.shape.cells:
        _Worker(builder, cell).plan()
    builder.join()
    return builder.graph()


class _Builder:
    """Collects nodes of all workers, and the members of every transfer and collective."""

    def __init__(self, job: Job, *, gc_slots: bool, checkpoint_slots: bool) -> None:
        self.job, self.shape = job, job.shape
        self.gc_slots, self.checkpoint_slots = gc_slots, checkpoint_slots
        self.checkpoints_gathered = False
        self.topology = Topology(job)
        self.source: list[int] = []
        self.cell: list[int] = []
        self.index: list[int] = []
        self.before: list[list[int]] = []
        self.flows: dict[int, Flow] = {}
        self.ops: list[RecordedOp] = []
        self.last: dict[Cell, int] = {}
        self.rendezvous: dict[tuple[object, ...], int] = {}

    def node(self, source: Source, cell: Cell | None, index: int, before: Iterable[int | None]) -> int:
        """A new node; `None` among `before` stands for nothing."""
        number = len(self.source)
        self.source.append(source)
        self.cell.append(-1 if cell is None else cell[0] * self.shape.pp + cell[1])
        self.index.append(index)
        self.before.append([other for other in before if other is not None])
        return number

    def meeting(self, key: tuple[object, ...], flow: Flow | None) -> int:
        """The node where the members of a transfer or collective meet; created on first use."""
        if key not in self.rendezvous:
            number = self.node(Source.CLIP if flow is None else Source.FLOW, None, 0, ())
            self.rendezvous[key] = number
            if flow is not None:
                self.flows[number] = flow
        return self.rendezvous[key]

    def join(self) -> None:
        """Number the flows by their key, so that equal jobs draw equal noise."""
        ordered = sorted((key for key, node in self.rendezvous.items() if node in self.flows), key=str)
        for number, key in enumerate(ordered):
            node = self.rendezvous[key]
            flow = self.flows[node]
            self.flows[node] = Flow(number, flow.size, flow.resources, flow.latency_s, flow.collective, flow.link)

    def graph(self) -> StepGraph:
        """The finished graph."""
        after: list[list[int]] = [[] for _ in self.source]
        for number, before in enumerate(self.before):
            for other in before:
                after[other].append(number)
        source = np.array(self.source)
        nodes_of = {kind: np.flatnonzero(source == kind) for kind in Source if kind > Source.FLOW}
        index = np.array(self.index)
        return StepGraph(
            source=self.source,
            cell=self.cell,
            index=self.index,
            waits=[len(before) for before in self.before],
            after=[tuple(others) for others in after],
            flows=self.flows,
            ops=tuple(self.ops),
            last=self.last,
            nodes_of=nodes_of,
            index_of={kind: index[nodes] for kind, nodes in nodes_of.items()},
        )


def launches(shape: Shape) -> int:
    """Upper bound of a worker's launches other than computes."""
    return 4 * shape.computes + 4 * shape.vpp + 16


class _Worker:
    """Plans one worker: its host thread, its compute stream, its send and receive engines, its collectives."""

    def __init__(self, builder: _Builder, cell: Cell) -> None:
        self.build, self.job, self.shape, self.cell = builder, builder.job, builder.shape, cell
        self.number = cell[0] * builder.shape.pp + cell[1]
        self.host: int | None = None  # the last launch
        self.host_waits: list[int] = []  # nodes that the next launch waits for
        self.launched = 0
        self.compute: int | None = None  # the last op of the compute stream
        self.engine: dict[str, int] = {}  # the last op of each send or receive engine
        self.last_compute: dict[bool, int] = {}  # the last compute of each direction
        self.arrived: dict[tuple[bool, int], int] = {}
        self.outputs: dict[tuple[bool, int], int] = {}
        self.collective: int | None = None  # the last op of the data-parallel stream
        self.gathered: dict[int, int] = {}

    def plan(self) -> None:
        """One step of this worker."""
        self._begin()
        items = program(self.job, self.cell[1])
        last_of_chunk = {item.chunk: item for item in items if isinstance(item, Compute) and not item.forward}
        for item in items:
            self._item(item)
            overlapped = self.job.overlap_dp and self.job.has_collectives
            if overlapped and isinstance(item, Compute) and last_of_chunk[item.chunk] is item:
                self._reduce(item.chunk, [self.compute])
        self._finish([compute.chunk for compute in last_of_chunk.values()])

    def launch(self, source: Source = Source.LAUNCH, index: int | None = None) -> int:
        """The host thread launches something."""
        if index is None:
            index = self.number * launches(self.shape) + self.launched
            self.launched += 1
        self.host = self.build.node(source, self.cell, index, [self.host, *self.host_waits])
        self.host_waits = []
        return self.host

    def op(self, kind: str, begin: int, end: int, microbatch: int | None = None, chunk: int | None = None) -> None:
        """Record an op."""
        source = Source(self.build.source[begin])
        self.build.ops.append(RecordedOp(self.cell, kind, begin, end, microbatch, chunk, source))

    def work(self, kind: str, source: Source, index: int, before: Sequence[int | None]) -> int:
        """An op of the compute stream that takes time of its own."""
        node = self.build.node(source, self.cell, index, [self.compute, *before])
        self.op(kind, node, node)
        self.compute = node
        return node

    def _begin(self) -> None:
        late = self.build.checkpoints_gathered
        if self.build.checkpoint_slots and not late:
            self._checkpoint()
        if self.job.host.loads_first and not late:
            self._load()
        if self.job.has_collectives and self.job.gathers:
            for chunk in range(self.shape.vpp):
                self.gathered[chunk] = self._ring("params-all-gather", chunk, [], 1.0 / self.shape.vpp)
        if self.build.checkpoint_slots and late:
            self._checkpoint()
        if not self.job.host.loads_first or late:
            self._load()

    def _checkpoint(self) -> None:
        self.host_waits = [self.work("checkpoint", Source.CHECKPOINT, self.number, [self.launch()])]

    def _load(self) -> None:
        if self.cell[1] in (0, self.shape.pp - 1) or self.job.host.all_stages_load:
            load = self.build.node(Source.DATA_LOAD, self.cell, self.number, [self.launch()])
            if self.job.recording.data_load:
                self.op("data-load", load, load)
            self.host_waits = [load]

    def _item(self, item: Item) -> None:
        match item:
            case Compute():
                self._compute(item)
            case Transfer() if self.job.posting is Posting.BATCHED:
                self._batch(item)
            case Transfer(sends=(compute,)):
                self._send(compute)
            case Transfer(recvs=(compute,)):
                self._recv(compute)

    def _compute(self, item: Compute) -> None:
        index = (self.number * self.shape.vpp + item.chunk) * self.shape.microbatches + item.microbatch
        if item.forward and self.build.gc_slots:
            collected = self.work("gc", Source.GC, index, [self.launch()])
            self.host_waits = [collected]
        key = (item.forward, item.number)
        launched = self.launch(Source.LAUNCH_FORWARD if item.forward else Source.LAUNCH_BACKWARD, index)
        gathered = self.gathered.pop(item.chunk, None) if item.forward else None
        kind = "forward-compute" if item.forward else "backward-compute"
        source = Source.FORWARD if item.forward else Source.BACKWARD
        node = self.build.node(source, self.cell, index, [launched, self.compute, self.arrived.get(key), gathered])
        self.op(kind, node, node, item.microbatch, item.chunk)
        self.compute = self.last_compute[item.forward] = self.outputs[key] = node
        if self.job.host.mode is Host.IN_STEP:
            self.host_waits.append(node)

    def _flow(self, item: Compute, *, sent: bool) -> int:
        """The transfer of a compute's output (or input), shared by both of its ends."""
        stride = 1 if item.forward else -1
        dp, stage = self.cell
        sender = stage if sent else (stage - stride) % self.shape.pp
        link = sender if item.forward else (sender - 1) % self.shape.pp
        receiver = (sender + stride) % self.shape.pp
        wraps = receiver != sender + stride
        chunk = item.chunk + (stride if sent and wraps else 0)  # named after the chunk that receives
        key = ("p2p", dp, item.forward, receiver, chunk, item.microbatch)
        topology, network = self.build.topology, self.job.network
        resources = topology.between((dp, sender), (dp, receiver), link, forward=item.forward)
        flow = Flow(0, network.activation_bytes, resources, network.latency_s, collective=False, link=link)
        return self.build.meeting(key, flow)

    def _post(self, kind: str, before: Sequence[int | None]) -> int:
        """A send or receive starts on its engine."""
        return self.build.node(Source.POINT, self.cell, 0, [*before, self.engine.get(kind)])

    def _send(self, item: Compute) -> None:
        kind = "forward-send" if item.forward else "backward-send"
        post = self._post(kind, [self.launch(), self.outputs[item.forward, item.number]])
        self._transfer(kind, post, self._flow(item, sent=True))

    def _recv(self, item: Compute) -> None:
        kind = "forward-recv" if item.forward else "backward-recv"
        behind = {
            Posting.SAME_DIRECTION: self.last_compute.get(item.forward, self.compute),
            Posting.ANY_DIRECTION: self.compute,
        }.get(self.job.posting)
        post = self._post(kind, [self.launch(), behind])
        flow = self._flow(item, sent=False)
        self._transfer(kind, post, flow)
        self.arrived[item.forward, item.number] = flow
        if self.job.host.mode is Host.IN_STEP and self.job.posting is not Posting.EARLY:
            self.host_waits.append(flow)

    def _transfer(self, kind: str, post: int, flow: int) -> None:
        self.build.before[flow].append(post)
        self.engine[kind] = flow
        self.op(kind, post, flow)

    def _batch(self, item: Transfer) -> None:
        """Sends and receives issued at once: they start together, end together, and the host waits for them."""
        post = self.build.node(Source.POINT, self.cell, 0, [self.launch(), self.compute])
        flows = []
        for computes, sent in ((item.sends, True), (item.recvs, False)):
            for compute in computes:
                flow = self._flow(compute, sent=sent)
                self.build.before[flow].append(post)
                flows.append((compute, flow, sent))
        done = self.build.node(Source.POINT, self.cell, 0, [flow for _, flow, _ in flows])
        for compute, _, sent in flows:
            self.op(f"{'forward' if compute.forward else 'backward'}-{'send' if sent else 'recv'}", post, done)
        self.compute = done
        self.host_waits.append(done)

    def _ring(self, kind: str, chunk: int | None, before: Sequence[int | None], share: float) -> int:
        """Join a collective over the data-parallel ranks of this stage."""
        post = self.build.node(Source.POINT, self.cell, 0, [self.launch(), self.collective, *before])
        network, topology = self.job.network, self.build.topology
        size, hops = network.parameter_bytes * share * self.job.dp_bytes, self.shape.dp - 1
        if kind == "separate-grads-all-reduce":
            size, hops = network.separate_bytes * self.job.dp_bytes, 2 * hops
        resources = topology.ring(self.cell[1])
        flow = Flow(0, size * hops / self.shape.dp, resources, hops * network.latency_s, collective=True)
        node = self.build.meeting((kind, self.cell[1], chunk), flow)
        self.build.before[node].append(post)
        self.op(kind, post, node, None, chunk)
        self.collective = node
        return node

    def _reduce(self, chunk: int, before: Sequence[int | None]) -> int:
        return self._ring("grads-reduce-scatter", chunk, before, 1.0 / self.shape.vpp)

    def _finish(self, chunks: Sequence[int]) -> None:
        """Everything behind the last backward: reductions, clipping, the optimizer."""
        if self.job.recording.gc_marker:
            marker = self.build.node(Source.POINT, self.cell, 0, [self.compute, self.launch()])
            self.op("gc", marker, marker)
        reduced = self.collective if self.job.overlap_dp else None
        done = self.work("layernorm-grads-all-reduce", Source.LAYERNORM, self.number, [self.launch(), reduced])
        if self.shape.pp > 1 and self.cell[1] in (0, self.shape.pp - 1):
            done = self._embedding(done)
        if self.job.has_collectives and self.job.overlap_dp:
            done = self._ring("separate-grads-all-reduce", None, [done], 0.0)
        elif self.job.has_collectives:
            for chunk in chunks:
                done = self._reduce(chunk, [done])
        post = self.build.node(Source.POINT, self.cell, 0, [self.launch(), done])
        clip = self.build.meeting(("clip",), None)
        self.build.before[clip].append(post)
        self.op("optimizer-clip-main-grad", post, clip)
        self.compute = clip
        self.build.last[self.cell] = self.work("optimizer", Source.OPTIMIZER, self.number, [self.launch()])

    def _embedding(self, before: int) -> int:
        dp, last = self.cell[0], self.shape.pp - 1
        post = self.build.node(Source.POINT, self.cell, 0, [self.launch(), before])
        network = self.job.network
        resources = self.build.topology.exchange((dp, 0), (dp, last))
        flow = Flow(0, network.embedding_bytes, resources, network.latency_s, collective=True)
        node = self.build.meeting(("embedding", dp), flow)
        self.build.before[node].append(post)
        self.op("embedding-grads-all-reduce", post, node)
        return node
