"""The replay as plainly as it can be said: a networkx graph walked op by op, and random graphs to try it on."""

from __future__ import annotations

from dataclasses import dataclass

import networkx
import numpy as np
from hypothesis import strategies as st

from tracekit.analysis.graph.megatron import Structure
from tracekit.trace.model import KINDS, OpKind

COMPUTE, SEND, RECV, GATHER = (
    kind.code for kind in (OpKind.FORWARD_COMPUTE, OpKind.FORWARD_SEND, OpKind.FORWARD_RECV, OpKind.PARAMS_ALL_GATHER)
)


@dataclass(frozen=True)
class RandomJob:
    """A structure with random dependencies, how many lanes each step has, and random costs and delays."""

    structure: Structure
    lanes_per_step: tuple[int, ...]
    cost: np.ndarray
    delay: np.ndarray

    @property
    def first_lane(self):
        return np.concatenate([[0], np.cumsum(self.lanes_per_step)])


@st.composite
def random_jobs(draw):
    """Up to 12 ops with edges from lower to higher rows, some in pairs that transfer together, some joining lanes."""
    rows = draw(st.integers(1, 12))
    kinds = draw(st.lists(st.sampled_from([COMPUTE, SEND, GATHER]), min_size=rows, max_size=rows))
    group = list(range(rows))
    for row in range(1, rows):  # neighbours may form a send-recv pair: no path can lead from one to the other
        if kinds[row] == kinds[row - 1] == SEND and group[row - 1] == row - 1 and draw(st.booleans()):
            kinds[row], group[row] = RECV, row - 1
    edges = draw(st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, rows - 1)), max_size=3 * rows))
    edges = [(low, high) for low, high in edges if low < high and group[low] != group[high]]
    lanes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    values = st.floats(0, 10, allow_subnormal=False)
    cells = rows * sum(lanes)
    cost = np.array(draw(st.lists(values, min_size=cells, max_size=cells))).reshape(rows, -1)
    delay = np.array(draw(st.lists(values, min_size=cells, max_size=cells))).reshape(rows, -1)
    structure = Structure(
        pp_rank=np.zeros(rows, np.int16),
        kind=np.array(kinds, np.uint8),
        seq=np.arange(rows, dtype=np.int32),
        chunk=np.full(rows, -1, np.int16),
        before=np.array([low for low, _ in edges], np.int64),
        after=np.array([high for _, high in edges], np.int64),
        group=np.array(group, np.int64),
        dp_key=np.array([row if kind == GATHER else -1 for row, kind in enumerate(kinds)], np.int64),
    )
    return RandomJob(structure, lanes, cost, delay)


def oracle_times(job: RandomJob, *, delays: bool) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every op, [rows, lanes], by longest path.

    Nodes: ("start", row, lane), ("ready", group) once all of a group have started, ("end", row, lane).
    """
    graph = networkx.DiGraph()
    part = job.structure
    step_of_lane = np.repeat(np.arange(len(job.lanes_per_step)), job.lanes_per_step)
    for lane, step in enumerate(step_of_lane):
        for row, kind in enumerate(part.kind):
            start, end = ("start", row, lane), ("end", row, lane)
            graph.add_edge("origin", start, length=float(job.delay[row, lane]) if delays else 0.0)
            ready = ("ready", int(part.group[row]), int(step) if part.dp_key[row] >= 0 else (int(step), lane))
            communicates = KINDS[kind].is_communication
            graph.add_edge(start, ready if communicates else end, length=0.0 if communicates else job.cost[row, lane])
            if communicates:
                graph.add_edge(ready, end, length=job.cost[row, lane])
        for low, high in zip(part.before, part.after, strict=True):
            late = float(job.delay[high, lane]) if delays else 0.0
            graph.add_edge(("end", int(low), lane), ("start", int(high), lane), length=late)
    times = {"origin": 0.0}
    for node in networkx.topological_sort(graph):
        if node != "origin":
            times[node] = max(
                times[before] + graph.edges[before, node]["length"] for before in graph.predecessors(node)
            )
    shape = job.cost.shape
    starts = np.array([[times["start", row, lane] for lane in range(shape[1])] for row in range(shape[0])])
    ends = np.array([[times["end", row, lane] for lane in range(shape[1])] for row in range(shape[0])])
    return starts, ends
