"""One job, analysed in batches of its steps.

In: the file of a pipeline, and an executor. Out: its report. A batch is some steps that fit into the memory of a
process. All batches are analysed alike until they need to know something of the whole job; then what they contribute is
merged, and a round of tasks continues with the answer (`analysis/numeric/parallel.py`). So all figures of steps,
workers and ops are those of the job in one piece, to the last bit. What cannot be divided, causes, fixes and answers,
follows from as many steps as fit, spread evenly over the job, with the clocks, rules and ideals of all of it.

Tasks exchange files in a folder that every process can reach. A task that dies is repeated.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, structs

from tracekit.analysis.attribution.attribute import ReplayedSteps, joined
from tracekit.analysis.graph.lanes import JobLanes, place_lanes
from tracekit.analysis.numeric.parallel import Asked, Divided
from tracekit.analysis.replay import Method
from tracekit.analysis.replay.engine import JobGraph, cut_steps, incomplete_steps
from tracekit.base.errors import GraphError, LayoutError, OutputError, SelectionError, TraceError, TracekitError
from tracekit.base.stderr import advance
from tracekit.fleet.tasks import BASE_BYTES, Batch, Executor, TaskOutcome
from tracekit.report.tables import MethodUsed
from tracekit.sources.load import read_trace
from tracekit.trace.canonical import Trace, read_header, rows_of_steps
from tracekit.trace.facts import TraceCoverage
from tracekit.trace.model import TimeUnit, Worker
from tracekit.trace.units import FEWEST_STEPS

if TYPE_CHECKING:
    from tracekit.analysis.job.job import Analysis, ReportOptions

#: Most ops of a batch, unless a single step has more, and of the steps from which causes and fixes follow.
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
    unit: TimeUnit | None = None
    method: Method = Method.TRACEKIT
    redact: bool = False

    def read(self, steps: Sequence[int]) -> Trace:
        """The trace of these steps. Raises FormatError, TraceError or LayoutError; SelectionError if its clock runs
        across steps.
        """
        try:
            trace = read_trace(self.path, self.layout, unit=self.unit, steps=steps)
        except TraceError as error:
            if " row" not in str(error):
                raise
            where = f"rows are counted in steps {steps[0]} to {steps[-1]} alone"
            raise type(error)(f"{error} ({where})") from None
        recorded_starts = (read_header(self.path) or {}).get("step_starts", {})
        if any(recorded_starts.get(str(step)) != start for step, start in trace.step_starts.items()):
            raise SelectionError(f"{self.path}: starts count from one clock for all steps: use --engine local")
        return trace.redacted() if self.redact else trace


class _BatchFacts(Struct, frozen=True):
    """Facts about a batch: the `ranks` of its workers, the number of worker-steps, and `cut_steps`."""

    ranks: Mapping[Worker, int]
    worker_steps: int
    cut: tuple[int, ...]


class _Result(Struct, frozen=True):
    """The result of a batch: `asked` and its `part` of the question, or the replayed steps; or its error."""

    seen: _BatchFacts | None
    asked: Callable[[Sequence[Any]], Any] | None
    part: Any


def analyse_batch(batch: Batch) -> TaskOutcome:
    """Analyse a batch as far as the answers in its folder allow, and store the result there."""
    folder = Path(batch.folder)
    job, batches = _load(folder / "job")
    result = _analysed(job, batches[batch.number], folder / f"placed-{batch.number}", _load(folder / "answers"))
    try:
        _save(folder / f"result-{batch.number}", result)
    except OutputError as error:
        return TaskOutcome(batch.name, rule=_NO_ROOM, reason=str(error))
    return TaskOutcome(batch.name)


def _analysed(job: JobFile, steps: Sequence[int], placed: Path, answers: Sequence[Any]) -> _Result:
    divided, seen = Divided(answers), None
    try:
        if placed.exists():
            seen, trace, lanes, divided.asked = _load(placed)
        else:
            trace = job.read(steps)
            seen = _BatchFacts(trace.worker_ranks(), trace.coverage().worker_steps_traced, cut_steps(trace))
            lanes = place_lanes(trace, divided)
            # can be pickled
            trace = replace(trace.outline(), step_starts=dict(trace.step_starts), metadata=dict(trace.metadata))
            _save(placed, (seen, trace, lanes, divided.asked))
        graph = JobGraph.from_trace(trace, job.method, divided, lanes, lambda: job.read(steps))
        return _Result(seen, None, ReplayedSteps.of(graph.replay, divided))
    except Asked as question:
        return _Result(seen, question.merge, question.part)
    except TracekitError as error:
        return _Result(seen, None, error)


def analysed_in_batches(
    job: JobFile,
    executor: Executor,
    *,
    ignored: Sequence[int] = (),
    batch_ops: int = BATCH_OPS,
    evidence_ops: int = EVIDENCE_OPS,
    progress: Progress = lambda _: None,
    options: ReportOptions,
) -> Analysis:
    """The analysis of a job. `options`: as `Job.analyse` takes it. `ignored`: step numbers to leave out.

    `batch_ops`, `evidence_ops`: the ops of a batch, and of the steps from which causes and fixes follow, unless a
    single step has more. Raises TraceError and its like as the analysis in one piece does, SelectionError if only that
    can analyse the job, OutputError if the folder for temporary files is full.
    """
    progress("the steps of the trace")
    rows = rows_of_steps(job.path)
    if None in rows:
        raise TraceError(f"{job.path}: ops without a step; drop or repair these rows")
    if not rows:
        raise TraceError(f"{job.path}: no ops (0 rows); record at least one step")
    steps = {step: ops for step, ops in rows.items() if step not in ignored}
    if not steps or (ignored and len(steps) == len(rows)):
        raise SelectionError(f"--ignore-steps leaves {len(steps)} of {len(rows)} steps, {min(rows)} to {max(rows)}")
    job.read(list(steps)[:FEWEST_STEPS])  # what is wrong with the file, and a clock that runs on, shows at once
    ops = sum(steps.values())
    run = _BatchedJob(job, executor)
    while (parts := run.replayed(steps, batch_ops)) is None:
        pass
    return run.analysis(joined(parts), ops, len(steps), evidence_ops, options)


class _BatchedJob:
    """The analysis of a job in rounds. `steps`: ops of each step that is not left out."""

    def __init__(self, job: JobFile, executor: Executor) -> None:
        self.job, self.executor = job, executor
        self.left_out: tuple[int, ...] = ()
        self.dropped: tuple[tuple[int, int], ...] = ()
        self.answers: list[Any] = []
        self.seen: list[_BatchFacts] = []
        self.steps: dict[int, int] = {}

    def replayed(self, steps: Mapping[int, int], batch_ops: int) -> list[ReplayedSteps] | None:
        """The replayed steps of all batches; None if more steps are to be left out."""
        self.steps = {step: ops for step, ops in steps.items() if step not in self.left_out}
        batches, self.answers = list(_batches(self.steps, batch_ops)), []
        # A process that is being killed may still write there.
        with tempfile.TemporaryDirectory(prefix="tracekit-batches-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            _save(folder / "job", (self.job, batches))
            while True:
                _save(folder / "answers", self.answers)
                results = self._round(folder, batches)
                self.seen = self.seen or [result.seen for result in results if result.seen is not None]
                if error := next((result.part for result in results if isinstance(result.part, TracekitError)), None):
                    self._leave_out_cut(error)
                    return None
                merges = {result.asked for result in results}
                if merges == {None}:
                    return [result.part for result in results]
                if len(merges) > 1:
                    raise SelectionError(f"{self.job.path}: its steps differ too much for batches; use --engine local")
                (merge,) = merges
                assert merge is not None, "handled above"
                answer = merge([result.part for result in results])
                if isinstance(answer, JobLanes) and self._leaves_out(answer):
                    return None
                self.answers.append(answer)

    def _round(self, folder: Path, batches: Sequence[Sequence[int]]) -> list[_Result]:
        memory_bytes = [BASE_BYTES + BYTES_PER_OP * sum(self.steps[step] for step in batch) for batch in batches]
        unfinished = {number: Batch(str(folder), number, memory_bytes[number]) for number in range(len(batches))}
        for attempt in range(_ATTEMPTS):
            for outcome in self.executor.run(list(unfinished.values()), alone=attempt > 0):
                reason = outcome.reason
                if outcome.died:
                    continue
                if outcome.rule == _NO_ROOM:
                    raise OutputError(reason)
                if outcome.rule is not None:
                    raise self._error(batches[int(outcome.url)], reason)
                del unfinished[int(outcome.url)]
                done = len(batches) - len(unfinished)
                advance(f"round {len(self.answers) + 1}", done, len(batches), "batches of steps")
            if not unfinished:
                break
        if unfinished:
            raise self._error(batches[min(unfinished)], f"{reason}, {_ATTEMPTS} times")
        return [_load(folder / f"result-{number}") for number in range(len(batches))]

    def _error(self, steps: Sequence[int], reason: str | None) -> TraceError:
        return TraceError(f"{self.job.path}: steps {steps[0]} to {steps[-1]}: {reason}")

    def _leave_out_cut(self, error: TracekitError) -> None:
        """Leave out steps whose recording was cut. Raises `error` if it has another reason."""
        if isinstance(error, LayoutError):  # a stage or a rank may be missing from these steps only
            raise SelectionError(f"{error}. If other steps have it: --engine local")
        cut = tuple(step for seen in self.seen for step in seen.cut)
        if self.left_out or not isinstance(error, GraphError) or not 0 < len(cut) < len(self.steps):
            raise error
        self.left_out, self.dropped = cut, ()

    def _leaves_out(self, lanes: JobLanes) -> bool:
        """Whether more steps have to be left out. Raises SelectionError if steps without some DP ranks remain."""
        self.dropped = self.dropped or lanes.dropped
        if self.job.method is Method.TRACEKIT and (more := incomplete_steps(lanes)):
            self.left_out += more
            return True
        if (lanes.lanes_of_step != len(lanes.dp_ranks)).any():
            raise SelectionError(
                f"{self.job.path}: DP ranks are missing from some steps: use --engine local, or --ignore-steps"
            )
        return False

    def analysis(
        self, fields: Mapping[str, Any], ops: int, steps: int, evidence_ops: int, options: ReportOptions
    ) -> Analysis:
        """The analysis, with causes and fixes from some steps."""
        from tracekit.analysis.job.pipeline_report import ReplayedJob, published_graph

        sampled = _spread(self.steps, evidence_ops)
        all_sampled, left_out = len(sampled) == len(self.steps), tuple(sorted(self.left_out))
        trace = self.job.read([*sampled, *left_out] if all_sampled else sampled)
        replayed = trace.without_steps(left_out) if all_sampled and left_out else trace
        graph = JobGraph.from_trace(replayed, self.job.method, Divided(self.answers))
        op_graph = structs.replace(graph.graph, dropped_lanes=self.dropped)
        graph = structs.replace(graph, graph=op_graph, left_out_steps=left_out)
        ranks = self._ranks()
        dp_rank, pp_rank = np.array([(worker.dp_rank, worker.pp_rank) for worker in ranks]).T
        lean = ReplayedJob(
            trace=trace.outline(),
            ops=ops,
            graph=graph,
            published=published_graph(trace, graph) if all_sampled else None,
        )
        del trace, replayed
        analysed = lean.analysed(options)
        attribution = structs.replace(analysed.attribution, **fields)
        diagnosis = analysed.diagnosis
        if not all_sampled:
            trust = attribution.trust_given(diagnosis.trust.unexplained)
            reasons = trust.reasons or diagnosis.trust.reasons
            trust = structs.replace(trust, trustworthy=not reasons, reasons=reasons)
            lost_s = np.full(len(self.steps), np.nan)  # unknown for other steps
            lost_s[np.isin(attribution.steps, sampled)] = diagnosis.headline.step_lost_s
            headline = structs.replace(diagnosis.headline, step_lost_s=lost_s)
            diagnosis = structs.replace(diagnosis, trust=trust, headline=headline)
        recorded = sum(seen.worker_steps for seen in self.seen)
        return structs.replace(
            analysed,
            diagnosis=diagnosis,
            coverage=TraceCoverage.of(lean.trace.layout, dp_rank, pp_rank, steps, recorded),
            ranks=ranks,
            attribution=attribution,
            method=analysed.method if all_sampled else MethodUsed(self.job.method, None, []),
            evidence_steps=None if all_sampled else len(sampled),
        ).analysis()

    def _ranks(self) -> dict[Worker, int]:
        """The rank of each worker. Raises TraceError if one has two."""
        ranks: dict[Worker, int] = {}
        for worker, rank in chain.from_iterable(seen.ranks.items() for seen in self.seen):
            if ranks.setdefault(worker, rank) != rank:
                raise TraceError(f"{self.job.path}: worker {worker} has rank {rank} in some steps only")
        return dict(sorted(ranks.items()))


def _batches(steps: Mapping[int, int], most: int) -> Iterator[list[int]]:
    """Runs of neighbouring steps with at most `most` ops, or a single step. `steps`: the ops of each."""
    batch, size = list[int](), 0
    for step, ops in steps.items():
        if batch and size + ops > most:
            yield batch
            batch, size = [], 0
        batch.append(step)
        size += ops
    yield batch


def _spread(steps: Mapping[int, int], most: int) -> list[int]:
    """Evenly spread steps with about `most` ops together, at least one step. `steps`: the ops of each."""
    numbers = list(steps)
    count = min(len(numbers), max(1, most * len(numbers) // sum(steps.values())))
    return [numbers[position] for position in np.linspace(0, len(numbers) - 1, count).round().astype(int).tolist()]


def _load(path: Path) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file)  # noqa: S301 - our own file, in a folder that only this user can enter


def _save(path: Path, value: Any) -> None:
    """Write a file as a whole, so that a task that dies leaves none. Raises OutputError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path.parent}: temporary files of the analysis: {error.strerror}; set TMPDIR to a folder with more room"
        ) from None
