"""A gate for two jobs of any source: refuses what cannot be compared, and judges the rest.

In: baselines and a run. Out: a `Gate`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tracekit.analysis.attribution.by_label import SpentPhases, StepsSpent
from tracekit.analysis.attribution.gate import Gate, Runs, judge
from tracekit.analysis.gpu.recorded import KEPT
from tracekit.analysis.job.job import Job
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.rl.rl_run import WARM_UP
from tracekit.base.errors import SelectionError
from tracekit.base.text import listed, quoted, short
from tracekit.report.compare import SAME_WORK, rates
from tracekit.trace.facts import step_values, tokens_per_s
from tracekit.trace.model import Format, OpKind
from tracekit.trace.post_training import POST_TRAINING

#: What a trace may say of its job that makes runs different ones.
SAME_JOB = ("model", "layers", "gpu_model", "schedule", "microbatches")

#: Of a single baseline.
UNKNOWN_NOISE = (
    "one baseline does not show how far identical runs differ: give several, or --noise with the share that you know"
)


def gate(
    run: Job,
    baselines: Sequence[Job],
    limit: float,
    *,
    parts: Collection[str] = (),
    noise: float | None = None,
    ignored: Collection[int] = (),
) -> Gate:
    """Judge a run by one or more baselines. `limit`: the largest increase that passes, as a share. `parts`, `noise`: as
    for `judge`. `ignored`: steps to leave out of all of them.

    Raises SelectionError if a baseline is there twice, or of another job, naming all that differs; TraceError for one
    that cannot be replayed, or whose times contradict each other.
    """
    for baseline in baselines:
        if differing := "; ".join(_differences(_identity(baseline), _identity(run))):
            which = f"the baseline {short(baseline.trace.name)}" if len(baselines) > 1 else "the baseline"
            raise SelectionError(f"{which} is of another job: {differing}; record a baseline of this one")
    *before, after = (job.spent(ignored) for job in (*baselines, run))
    if len({side.step_s.tobytes() for side in before}) < len(before):
        raise SelectionError("two baselines have the same step times: a copy does not show how far runs differ")
    notes = [UNKNOWN_NOISE] if len(baselines) == 1 and noise is None else []
    now = after.ops_a_step
    most = max((side.ops_a_step for side in before), key=lambda ops: abs(now / ops - 1))
    if abs(now / most - 1) > SAME_WORK:
        notes.append(f"a step has {most:,.0f} ops in the baseline and {now:,.0f} in the run")
    if run.trace.metadata.get(POST_TRAINING, {}).get("format") == Format.TRAJECTORIES:
        notes.append(f"the first {WARM_UP} steps of a run warm up and do not count")
    notes += [
        f"{short(job.trace.name)}: left out, as unlike the other steps: {side.unlike}"
        for job, side in zip((*baselines, run), (*before, after), strict=True)
        if isinstance(side, SpentPhases) and side.unlike
    ]
    if change := rates(_tokens_per_s(baselines, before), _tokens_per_s([run], [after])):
        notes.append(change)
    names = listed([short(job.trace.name) for job in baselines])
    return Gate.of(
        Runs(names, sum(len(side.step_s) for side in before), len(before)),
        Runs(short(run.trace.name), len(after.step_s), 1),
        judge(before, after, limit, parts, noise),
        limit=limit,
        noise=noise,
        notes=tuple(notes),
    )


def _tokens_per_s(jobs: Sequence[Job], sides: Sequence[StepsSpent | SpentPhases]) -> float | None:
    """Tokens a second of the mean job; None if the loop of one logs no tokens."""
    per_s = list[float]()
    for job, side in zip(jobs, sides, strict=True):
        tokens = step_values(job.trace.metadata).get("tokens", {})
        timed = zip(side.steps, side.step_s.tolist(), strict=True)
        if (rate := tokens_per_s((tokens.get(step), s) for step, s in timed)) is None:
            return None
        per_s.append(rate)
    return sum(per_s) / len(per_s)


def _identity(job: Job) -> dict[str, Any]:
    """What must be equal for two runs to be comparable, by the words for it; None if it is not known."""
    trace = job.trace
    if POST_TRAINING in trace.metadata:
        return {"source": job.source, "engines": trace.sizes["world_size"] - 1}
    recorded = "profiler_step" in job.replay.graph.label_names
    identity = {"source": "a recording of GPUs" if recorded else job.source, **trace.sizes}
    identity |= {name: trace.metadata.get(name) for name in SAME_JOB}
    if isinstance(job, PipelineJob):
        forwards = job.trace.ops.filter(job.trace.ops["kind"] == OpKind.FORWARD_COMPUTE).height
        return identity | {"forward computes a step": round(forwards / len(trace.steps))}
    return identity | {"GPU": trace.metadata.get(KEPT, {}).get("gpu")}


def _differences(baseline: dict[str, Any], run: dict[str, Any]) -> Iterator[str]:
    if baseline["source"] != run["source"]:
        yield f"it is {baseline['source']}, the run {run['source']}"
        return
    for name, was in baseline.items():
        now = run[name]
        if was != now and was is not None and now is not None:
            yield f"{name} {quoted(was)} in the baseline, {quoted(now)} in the run"
