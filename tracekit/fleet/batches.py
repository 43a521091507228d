"""One job, analysed in batches of its steps.

In: the file of a pipeline, and an executor. Out: its report. A batch is some steps that fit into the memory of a
process. All batches are analysed alike until they need to know something of the whole job; then what they contribute is
merged, and a round of tasks continues with the answer (`analysis/numeric/whole.py`). So all figures of steps, workers
and ops are those of the job in one piece, to the last bit. What cannot be divided, causes, fixes and answers, follows
from as many steps as fit, spread evenly over the job, with the clocks, rules and ideals of all of it.

Tasks exchange files in a folder that every process can reach. A task that dies is repeated.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, structs

from tracekit.analysis.attribution.attribute import ReplayedSteps, joined
from tracekit.analysis.graph.lanes import place_lanes
from tracekit.analysis.graph.lanes_of_job import JobLanes
from tracekit.analysis.numeric.whole import Asked, Divided
from tracekit.analysis.replay.engine import JobGraph, cut_steps, incomplete_steps
from tracekit.analysis.replay.method import Method
from tracekit.base.errors import GraphError, OutputError, SelectionError, TraceError, TracekitError
from tracekit.fleet.executor import BASE_BYTES, Batch, Executor, Outcome
from tracekit.trace.canonical import (
    MOST_MISSING,
    Coverage,
    Trace,
    read_header,
    read_parquet,
    rows_of_steps,
    traced_dp_ranks,
)
from tracekit.trace.model import Layout, Unit, Worker
from tracekit.trace.units import FEWEST_STEPS

if TYPE_CHECKING:
    from tracekit.job.pipeline_report import PipelineReport

#: The ops of a batch, as far as a step does not have more, and those from which causes and fixes follow.
BATCH_OPS, EVIDENCE_OPS = 4_000_000, 8_000_000
#: Upper bound for the memory of the analysis of a batch, bytes for each op.
BYTES_PER_OP = 160
#: Times that a task is tried.
_ATTEMPTS = 3
#: The rule of an outcome whose files could not be written.
_NO_ROOM = "no room"

Progress = Callable[[str], None]


class JobFile(Struct, frozen=True):
    """A canonical Parquet file, or a published one with its `layout`. `unit`, `method`: as in `tracekit.load`.

    `redact`: without the names in it.
    """

    path: Path
    layout: Path | None = None
    unit: Unit | None = None
    method: Method = Method.TRACEKIT
    redact: bool = False

    def read(self, steps: Sequence[int]) -> Trace:
        """The trace of these steps. Raises FormatError, TraceError or LayoutError; SelectionError if its clock runs
        across steps.
        """
        known: Mapping[str, float] = {}
        if self.layout is None:
            trace = read_parquet(self.path, unit=self.unit, steps=steps)
            known = (read_header(self.path) or {}).get("step_starts", {})
        else:
            from tracekit.collectors.importers.published import read_published

            trace = read_published(self.path, self.layout, unit=self.unit, steps=steps)
        if trace.step_starts != {int(step): float(start) for step, start in known.items()}:
            raise SelectionError("starts count from one clock for all steps: use --engine local")
        return trace.redacted() if self.redact else trace


class _Result(Struct, frozen=True):
    """The result of a batch: `asked` and its `part` of the question, or the replayed steps; or its error.

    `ranks`: of its workers. `worker_steps`: how many of them are traced.
    """

    asked: Callable[[Sequence[Any]], Any] | None
    part: Any
    ranks: Mapping[Worker, int]
    worker_steps: int


def analyse_batch(batch: Batch) -> Outcome:
    """Analyse a batch as far as the answers in its folder allow, and leave the result there."""
    folder = Path(batch.folder)
    job, batches = _load(folder / "job")
    found: _Result | TracekitError
    try:
        found = _analysed(job, batches[batch.number], folder / f"placed-{batch.number}", _load(folder / "answers"))
    except TracekitError as error:
        found = error
    try:
        _save(folder / f"result-{batch.number}", found)
    except OutputError as error:
        return Outcome(batch.name, rule=_NO_ROOM, reason=str(error))
    return Outcome(batch.name)


def _analysed(job: JobFile, steps: Sequence[int], placed: Path, answers: Sequence[Any]) -> _Result:
    whole = Divided(answers)
    if placed.exists():
        trace, lanes, whole.taken = _load(placed)
    else:
        trace, lanes = job.read(steps), None
    try:
        if lanes is None:
            lanes = place_lanes(trace, whole)
            trace = replace(
                trace.outline(), step_starts=dict(trace.step_starts), metadata=dict(trace.metadata)
            )  # can be pickled
            _save(placed, (trace, lanes, whole.taken))
        graph = JobGraph.from_trace(trace, job.method, whole, lanes, lambda: job.read(steps))
        asked, part = None, ReplayedSteps.of(graph.replay, whole)
    except Asked as question:
        asked, part = question.merge, question.part
    return _Result(asked, part, trace.worker_ranks(), trace.coverage().worker_steps_traced)


def analysed_in_batches(
    job: JobFile,
    executor: Executor,
    *,
    ignored: Sequence[int] = (),
    batch_ops: int = BATCH_OPS,
    evidence_ops: int = EVIDENCE_OPS,
    progress: Progress = lambda _: None,
    **asked: Any,
) -> PipelineReport:
    """The report on a job. `asked`: as `ReplayedJob.whatif` takes it. `ignored`: step numbers to leave out.

    `batch_ops`, `evidence_ops`: the ops of a batch, and of the steps from which causes and fixes follow, unless a
    single step has more. Raises TraceError and its like as the analysis in one piece does, SelectionError if only that
    can analyse the job, OutputError if the folder for temporary files is full.
    """
    progress("the steps of the trace")
    rows = rows_of_steps(job.path)
    if None in rows or not rows:
        raise TraceError(f"{job.path}: ops without a step; drop or repair these rows")
    steps = {step: ops for step, ops in rows.items() if step not in ignored}
    if not steps or (ignored and len(steps) == len(rows)):
        raise SelectionError(f"--ignore-steps leaves {len(steps)} of {len(rows)} steps, {min(rows)} to {max(rows)}")
    job.read(list(steps)[:FEWEST_STEPS])  # what is wrong with the file, and a clock that runs on, shows at once
    ops = sum(steps.values())
    whole = _Whole(job, executor, progress)
    fields = whole.fields(steps, batch_ops)
    return whole.report(fields, ops, evidence_ops, asked)


class _Whole:
    """The analysis of a job in rounds. `steps`: ops of each step that is not left out."""

    def __init__(self, job: JobFile, executor: Executor, progress: Progress) -> None:
        self.job, self.executor, self.progress = job, executor, progress
        self.cut: tuple[int, ...] = ()
        self.incomplete: tuple[int, ...] = ()
        self.dropped: tuple[tuple[int, int], ...] | None = None
        self.answers: list[Any] = []
        self.ranks: dict[Worker, int] = {}
        self.worker_steps = self.all_steps = 0
        self.counted = False
        self.steps: dict[int, int] = {}

    def fields(self, steps: Mapping[int, int], batch_ops: int) -> dict[str, Any]:
        """The fields of the attribution of the whole job."""
        self.all_steps = len(steps)
        while True:
            left_out = {*self.cut, *self.incomplete}
            self.steps = {step: ops for step, ops in steps.items() if step not in left_out}
            batches, self.answers = list(_batches(self.steps, batch_ops)), []
            with tempfile.TemporaryDirectory(prefix="tracekit-batches-") as folder:
                try:
                    parts = self._rounds(Path(folder), batches)
                except GraphError:
                    for some in batches:
                        trace = self.job.read(some)
                        self.cut += cut_steps(trace)
                        if not self.counted:
                            self._count(trace.worker_ranks(), trace.coverage().worker_steps_traced)
                    self.counted = True
                    if left_out or not 0 < len(self.cut) < len(self.steps):
                        raise
                    continue
            if parts is not None:
                return joined(parts)

    def _rounds(self, folder: Path, batches: Sequence[Sequence[int]]) -> list[ReplayedSteps] | None:
        """The replayed steps of all batches; None if other steps are to be left out."""
        _save(folder / "job", (self.job, batches))
        while True:
            _save(folder / "answers", self.answers)
            results = self._round(folder, batches)
            for result in () if self.counted else results:
                self._count(result.ranks, result.worker_steps)
            self.counted = True
            asked = {result.asked for result in results}
            if asked == {None}:
                return [result.part for result in results]
            if len(asked) > 1:
                raise SelectionError("the steps of this job differ too much for batches; use --engine local")
            (merge,) = asked
            assert merge is not None, "handled above"
            answer = merge([result.part for result in results])
            if isinstance(answer, JobLanes) and self._leaves_out(answer):
                return None
            self.answers.append(answer)

    def _round(self, folder: Path, batches: Sequence[Sequence[int]]) -> list[_Result]:
        """One task for each batch."""
        most = [BASE_BYTES + BYTES_PER_OP * sum(self.steps[step] for step in some) for some in batches]
        left = {number: Batch(str(folder), number, most[number]) for number in range(len(batches))}
        for attempt in range(_ATTEMPTS):
            for outcome in self.executor.run(list(left.values()), alone=attempt > 0):
                if outcome.died:
                    reason = outcome.reason
                    continue
                if outcome.rule == _NO_ROOM:
                    raise OutputError(outcome.reason)
                if outcome.rule is not None:
                    raise RuntimeError(outcome.reason)
                del left[int(outcome.url)]
                done = len(batches) - len(left)
                self.progress(f"round {len(self.answers) + 1}: {done} of {len(batches)} batches of steps")
            if not left:
                break
        if left:
            steps = batches[min(left)]
            raise TraceError(f"{self.job.path}: steps {steps[0]} to {steps[-1]}: {reason}, {_ATTEMPTS} times")
        found = [_load(folder / f"result-{number}") for number in range(len(batches))]
        for result in found:
            if isinstance(result, TracekitError):
                raise result
        return found

    def _count(self, ranks: Mapping[Worker, int], worker_steps: int) -> None:
        """Keep the ranks of workers, and in how many steps they are. Raises TraceError if one has two ranks."""
        self.worker_steps += worker_steps
        for worker, rank in ranks.items():
            if self.ranks.setdefault(worker, rank) != rank:
                raise TraceError(f"{self.job.path}: worker {worker} has rank {rank} in some steps only")

    def _leaves_out(self, lanes: JobLanes) -> bool:
        """Whether more steps have to be left out. Raises SelectionError if steps without some DP ranks remain."""
        if self.dropped is None:
            self.dropped = lanes.dropped
        if self.job.method is Method.TRACEKIT and (more := incomplete_steps(lanes)):
            self.incomplete = more
            return True
        if (lanes.lanes_of_step != len(lanes.dp_ranks)).any():
            raise SelectionError("DP ranks are missing from some steps: use --engine local, or --ignore-steps")
        return False

    def report(
        self, fields: Mapping[str, Any], ops: int, evidence_ops: int, asked: Mapping[str, Any]
    ) -> PipelineReport:
        """The report, with causes and fixes from some steps."""
        from tracekit.job.replayed import ReplayedJob, published_graph

        some = _spread(self.steps, evidence_ops)
        trace = self.job.read(some)
        graph = JobGraph.from_trace(trace, self.job.method, Divided(self.answers))
        all_here = len(some) == len(self.steps)
        lean = ReplayedJob(
            trace=trace.outline(),
            ops=ops,
            graph=graph,
            published=published_graph(trace, graph) if all_here else None,
        )
        del trace
        report = lean.whatif(**asked)
        attribution = structs.replace(report.attribution, **fields)
        diagnosis = report.diagnosis
        if not all_here:
            trust = attribution.trust_given(diagnosis.trust.unexplained)
            reasons = trust.reasons or diagnosis.trust.reasons
            trust = structs.replace(trust, trustworthy=not reasons, reasons=reasons)
            lost_s = np.full(len(self.steps), np.nan)  # unknown for other steps
            lost_s[np.isin(attribution.steps, some)] = diagnosis.verdict.step_lost_s
            verdict = structs.replace(diagnosis.verdict, step_lost_s=lost_s)
            diagnosis = structs.replace(diagnosis, trust=trust, verdict=verdict)
        return replace(
            report,
            diagnosis=diagnosis,
            coverage=self._coverage(report.layout),
            dropped_lanes=self.dropped or (),
            left_out_steps=tuple(sorted((*self.cut, *self.incomplete))),
            ranks=dict(sorted(self.ranks.items())),
            attribution=attribution,
            published=report.published if all_here else None,
            evidence_steps=None if all_here else len(some),
        )

    def _coverage(self, layout: Layout) -> Coverage:
        dp_ranks = traced_dp_ranks(layout, np.array([worker.dp_rank for worker in self.ranks]))
        every = (Worker(*place) for place in product(range(dp_ranks), range(layout.pp)))
        workers = dp_ranks * layout.pp
        return Coverage(
            workers_expected=workers,
            workers_traced=len(self.ranks),
            worker_steps_expected=self.all_steps * workers,
            worker_steps_traced=self.worker_steps,
            missing_workers=tuple(islice((worker for worker in every if worker not in self.ranks), MOST_MISSING)),
        )


def _batches(steps: Mapping[int, int], most: int) -> Iterator[list[int]]:
    """Runs of neighbouring steps that have at most so many ops, or a single step. `steps`: the ops of each."""
    batch, size = list[int](), 0
    for step, ops in steps.items():
        if batch and size + ops > most:
            yield batch
            batch, size = [], 0
        batch.append(step)
        size += ops
    yield batch


def _spread(steps: Mapping[int, int], most: int) -> list[int]:
    """Evenly spread steps that have about so many ops, at least one of them. `steps`: the ops of each."""
    numbers = list(steps)
    count = min(len(numbers), max(1, most * len(numbers) // sum(steps.values())))
    return [numbers[at] for at in np.linspace(0, len(numbers) - 1, count).round().astype(int).tolist()]


def _load(path: Path) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file)  # noqa: S301 - our own file, in a folder that only this user can enter


def _save(path: Path, value: Any) -> None:
    """Write a file as a whole, so that a task that dies leaves none. Raises OutputError."""
    whole = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(whole, "wb") as file:
            pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
        whole.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path.parent}: temporary files of the analysis: {error.strerror}; set TMPDIR to a folder with more room"
        ) from None
