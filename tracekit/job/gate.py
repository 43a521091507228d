"""A gate for two jobs of any source: refuses what cannot be compared, and judges the rest.

In: a baseline and a run. Out: a `Gate`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from tracekit.analysis.attribution.compare import SAME_WORK
from tracekit.analysis.attribution.gate import Gate, judge
from tracekit.analysis.attribution.spent import Spent
from tracekit.analysis.gpu.recorded import KEPT
from tracekit.base.errors import SelectionError
from tracekit.base.text import quoted, short
from tracekit.job.job import Job
from tracekit.job.pipeline import PipelineJob
from tracekit.trace.model import OpKind

#: What a trace may say of its job that makes runs different ones.
_SAME = ("model", "layers", "gpu_model", "schedule", "microbatches")


def gate(run: Job, baseline: Job, limit: float, *, parts: Collection[str] = (), ignored: Collection[int] = ()) -> Gate:
    """Judge a run by a baseline. `limit`: the largest increase that passes, as a share. `parts`: as for `judge`.
    `ignored`: steps to leave out of both.

    Raises SelectionError if the runs are of different jobs, naming all that differs; TraceError for one that cannot be
    replayed.
    """
    if differing := "; ".join(_differences(_identity(baseline), _identity(run))):
        raise SelectionError(f"the baseline is of another job: {differing}; record a baseline of this one")
    sides = Spent(baseline.replay, ignored), Spent(run.replay, ignored)
    steps = len(sides[0].step_s), len(sides[1].step_s)
    ops = [sum(block.start.size for block in side.replay.graph.blocks) / len(side.replay.graph.steps) for side in sides]
    notes = []
    if abs(ops[1] / ops[0] - 1) > SAME_WORK:
        notes.append(f"a step has {ops[0]:,.0f} ops in the baseline and {ops[1]:,.0f} in the run")
    return Gate(
        short(baseline.trace.name), short(run.trace.name), limit, steps, judge(*sides, limit, parts), tuple(notes)
    )


def _identity(job: Job) -> dict[str, Any]:
    """What must be equal for two runs to be comparable, by the words for it; None if it is not known."""
    trace, recorded = job.trace, "profiler_step" in job.replay.graph.label_names
    known = {"source": "a recording of GPUs" if recorded else job.source, **trace.sizes}
    known |= {name: trace.metadata.get(name) for name in _SAME}
    if isinstance(job, PipelineJob):
        forwards = job.trace.ops.filter(job.trace.ops["kind"] == OpKind.FORWARD_COMPUTE).height
        return known | {"forward computes a step": round(forwards / len(trace.steps))}
    return known | {"GPU": trace.metadata.get(KEPT, {}).get("gpu")}


def _differences(baseline: dict[str, Any], run: dict[str, Any]) -> Iterator[str]:
    if baseline["source"] != run["source"]:
        yield f"it is {baseline['source']}, the run {run['source']}"
        return
    for name, was in baseline.items():
        now = run[name]
        if was != now and was is not None and now is not None:
            yield f"{name} {quoted(was)} in the baseline, {quoted(now)} in the run"
