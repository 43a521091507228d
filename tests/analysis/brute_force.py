"""The figures of the published analysis as plainly as they can be said: a networkx graph walked op by op per question.

Shares the dependency rules with tracekit, and nothing of its replay, costs, ideals or attribution. Makes the numbers
that `test_parity.py` checks: `python -m tests.analysis.brute_force`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import networkx

from tracekit.analysis.graph.lanes import place_lanes
from tracekit.synth import SlowLastStage, SlowWorker, SynthSpec, synthesize
from tracekit.trace.canonical import Trace, read_parquet
from tracekit.trace.model import KINDS, Layout, OpKind

FOLDER = Path(__file__).parent / "parity"
#: The jobs, small enough to be walked op by op and different in what makes them slow.
JOBS = {
    "slow-worker": SynthSpec(
        layout=Layout(dp=3, pp=2),
        microbatches=4,
        steps=3,
        seed=1,
        causes=(SlowWorker(dp_rank=1, pp_rank=0, factor=1.5),),
    ),
    "slow-last-stage": SynthSpec(
        layout=Layout(dp=2, pp=4), microbatches=6, steps=3, seed=2, causes=(SlowLastStage(factor=1.4),)
    ),
}


class Op(NamedTuple):
    """One op; `meets`: what all ops share that transfer together, None for those that meet nobody."""

    step: int
    dp_rank: int
    stage: int
    kind: OpKind
    start: float
    end: float
    meets: tuple[Any, ...] | None


Chosen = Callable[[Op], bool]


class BruteForce:
    """A job as a graph of its ops: an edge to each op from what it waits for."""

    def __init__(self, trace: Trace) -> None:
        self.graph, self.ops = networkx.DiGraph(), {}
        lanes = place_lanes(trace)
        for group in lanes.groups:
            for lane in range(len(group.step)):
                self._add(group, lane, int(lanes.steps[group.step[lane]]))
        self.cost = {name: op.end - op.start for name, op in self.ops.items()}
        for meeting in self._meetings():
            last = max(self.ops[name].start for name in meeting)
            self.cost.update({name: self.ops[name].end - last for name in meeting})
        of_kind = defaultdict(list)
        for name, op in self.ops.items():
            of_kind[op.kind].append(self.cost[name])
        usual = {kind: (median if kind.is_communication else fmean)(costs) for kind, costs in of_kind.items()}
        self.ideal = {name: usual[op.kind] for name, op in self.ops.items()}

    def _add(self, group: Any, lane: int, step: int) -> None:
        rules, dp_rank = group.structure, int(group.dp_rank[lane])
        for row, code in enumerate(rules.kind):
            start = float(group.start[row, lane])
            end = start + float(group.duration[row, lane])
            alone, together = (int(rules.group[row]), dp_rank), (int(rules.dp_key[row]), None)
            meets = (step, *(together if rules.dp_key[row] >= 0 else alone))
            op = Op(step, dp_rank, int(rules.pp_rank[row]), KINDS[code], start, end, meets)
            self.ops[step, dp_rank, row] = op if op.kind.is_communication else op._replace(meets=None)
            self.graph.add_node((step, dp_rank, row))
        for before, after in zip(rules.before, rules.after, strict=True):
            self.graph.add_edge((step, dp_rank, int(before)), (step, dp_rank, int(after)))

    def _meetings(self) -> Iterable[list[Any]]:
        """The names of the ops of each transfer and each collective."""
        meetings = defaultdict(list)
        for name, op in self.ops.items():
            if op.meets is not None:
                meetings[op.meets].append(name)
        return [meeting for meeting in meetings.values() if len(meeting) > 1]

    def step_times(self, recorded: Chosen) -> dict[int, float]:
        """Seconds of each step if the chosen ops cost what they did and the others what they ideally would."""
        cost = {name: (self.cost if recorded(op) else self.ideal)[name] for name, op in self.ops.items()}
        starts, ends = {}, {}
        graph = networkx.DiGraph(self.graph)
        for meeting in self._meetings():  # a node in which all that meet have started
            ready = ("ready", *self.ops[meeting[0]].meets)
            for name in meeting:
                for after in list(graph.successors(name)):
                    graph.remove_edge(name, after)
                    graph.add_edge(("end", *name), after)
                graph.add_edge(name, ready)
                graph.add_edge(ready, ("end", *name))
        for node in networkx.topological_sort(graph):
            starts[node] = max((ends[before] for before in graph.predecessors(node)), default=0.0)
            if node[0] == "ready":
                ends[node] = starts[node]
            elif node[0] == "end":
                ends[node] = starts[node] + cost[node[1:]]
            else:  # an op, or the arrival of one that meets others
                meets = any(after[0] == "ready" for after in graph.successors(node))
                ends[node] = starts[node] + (0.0 if meets else cost[node])
        times: dict[int, float] = defaultdict(float)
        for node, end in ends.items():
            step = node[1] if node[0] in ("ready", "end") else node[0]
            times[step] = max(times[step], end)
        return dict(times)

    def figures(self) -> dict[str, Any]:
        """What the published analysis gives of a job: step times in seconds, slowdowns against the ideal."""

        def mean(chosen: Chosen) -> float:
            return fmean(self.step_times(chosen).values())

        recorded: dict[int, float] = defaultdict(float)
        for op in self.ops.values():
            recorded[op.step] = max(recorded[op.step], op.end)
        original, ideal = self.step_times(lambda _: True), self.step_times(lambda _: False)
        ideal_s = fmean(ideal.values())
        stages, dp_ranks = ({getattr(op, name) for op in self.ops.values()} for name in ("stage", "dp_rank"))
        by_stage = {at: mean(lambda op, at=at: op.stage == at) for at in sorted(stages)}
        by_dp_rank = {at: mean(lambda op, at=at: op.dp_rank == at) for at in sorted(dp_ranks)}
        by_worker = {
            (dp, pp): mean(lambda op, dp=dp, pp=pp: (op.dp_rank, op.stage) == (dp, pp))
            for dp in by_dp_rank
            for pp in by_stage
        }
        worst = max(by_worker, key=lambda at: min(by_dp_rank[at[0]], by_stage[at[1]]))
        last = max(by_stage)
        return {
            "recorded": dict(recorded),
            "original": original,
            "ideal": ideal,
            "slowdown": fmean(original.values()) / ideal_s,
            "by_stage": {at: time / ideal_s for at, time in by_stage.items()},
            "by_dp_rank": {at: time / ideal_s for at, time in by_dp_rank.items()},
            "by_worker": {f"{dp},{pp}": time / ideal_s for (dp, pp), time in by_worker.items()},
            "by_compute_kind": {
                str(kind): mean(lambda op, kind=kind: op.kind is kind) / ideal_s
                for kind in (OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE, OpKind.OPTIMIZER)
            },
            "m_w": {"added_s": by_worker[worst], "removed_s": mean(lambda op: (op.dp_rank, op.stage) != worst)},
            "m_s": {"added_s": by_stage[last], "removed_s": mean(lambda op: op.stage != last)},
        }


def main() -> None:
    """Make the traces with the simulator, and their numbers from the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, spec in JOBS.items():
        path = FOLDER / f"{name}.parquet"
        synthesize(spec).write_parquet(path)
        made = {"made_by": "python -m tests.analysis.brute_force", **BruteForce(read_parquet(path)).figures()}
        path.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
