"""The report on a job: what it loses, who causes it, why, what to do, and whether to believe it.

In: what `tracekit.analysis.job.build` made of a diagnosis, or a file with the JSON object (docs/report-schema.md). Out:
`Report`, which every surface shows: terminal, Markdown, HTML, notebooks, pages, stores, comparisons, bills. Nothing in
it is live: a report that was just made and one read from a file are the same.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl
from msgspec import UNSET, Struct

from tracekit.analysis.attribution.patterns import Stall, StepTimes
from tracekit.analysis.graph import PostingRule
from tracekit.analysis.numeric.arrays import Floats
from tracekit.base.errors import FormatError, OutputError, SelectionError, extra
from tracekit.base.limits import Amount, AtMostOne, Count, Number, Ordinal, Seconds, Slowdown
from tracekit.base.text import short
from tracekit.report import questions
from tracekit.report.conclusions import (
    SMALLEST_ALARMING_SHARE,
    Accused,
    Answer,
    CauseInWords,
    Finding,
    Fix,
    Patterns,
    RunVerdict,
    Trust,
    Verdict,
)
from tracekit.report.finding import LossKind
from tracekit.report.hardware import GpuInReport, MetricsInReport, OnGpu
from tracekit.report.questions import Bubbles, Experts, Overlap, Question
from tracekit.report.rl_step import Generation, Loss, LossTime, PhaseTime, Price, Sides, ToolsBound, Unlike
from tracekit.report.tables import (
    ClockOfRank,
    ClockReport,
    Collectives,
    Contribution,
    Correlation,
    Coverage,
    Kernels,
    MarkedStep,
    Maybe,
    MethodUsed,
    OfLabel,
    OfRank,
    OfStep,
    OfWorker,
    OnPath,
    Outline,
    Picture,
    Section,
    Table,
    Times,
    WaitFor,
    csv_kind,
    frame_of,
    row_type,
    safe_csv,
)
from tracekit.trace.facts import Lack, MissingMembers, tokens_per_s
from tracekit.trace.model import Worker

if TYPE_CHECKING:
    import pandas

#: Version of the JSON object; increased by one with every change that could break a reader of the version before.
REPORT_VERSION = 3
#: Tables of every report, of one row per finding or question, and those that only some sources have.
COMMON_TABLES = ("by_step", "by_label", "questions", "causes", "fixes")
PIPELINE_TABLES = (
    "by_kind",
    "by_pp_rank",
    "by_dp_rank",
    "by_worker",
    "critical_path",
    "critical_workers",
    "forward_backward_correlation",
)
_POST_TRAINING_TABLES = ("phases", "losses", "alternatives")
#: Columns of the JSON that a table leaves out.
_LEFT_OUT = {
    "causes": ("signature", "effect", "bound", "saved_when_acting_s", "refuted_by", "costs", "priced"),
    "fixes": ("edit", "unprofiled_step_s"),
}


class WorkerGrid(Struct, frozen=True, eq=False):
    """S of each worker alone, [dp_ranks, stages]; `rows`: the worker at each place."""

    dp_ranks: tuple[int, ...]
    slowdown: Floats
    rows: dict[Worker, OfWorker]


class Remark(Struct, frozen=True):
    """What else a reader must know; without a name, it continues the remark before."""

    name: str  #: what it is about; empty if it continues the remark before
    words: str  #: a sentence without a full stop


class Report(Struct, frozen=True, kw_only=True):
    """The report on one job, whatever its source: the JSON object of `tracekit whatif --json`.

        report = tracekit.load("job.parquet").whatif()
        report                                # in a notebook: answer, worker map, steps, causes, fixes
        report.answer.headline                # the same in words
        report.findings                       # why it is slow, the costliest first; `causes` in JSON
        report.slowdown                       # S, 1.0 for a job without stragglers
        report.table("by_label")              # a polars frame; report.pandas("by_label")
        report.write_csv("tables")            # every table as a file
        report.to_dict()                      # plain data

    An undefined figure is None. A key that the source lacks is `msgspec.UNSET`, which is false.
    """

    report_version: int  #: version of this schema
    job: Outline  #: which job
    answer: Answer  #: what is slow, who, why and what to do, in sentences
    verdict: Verdict  #: what kind of loss the job has, and how much
    trust: Trust  #: whether the replay explains the recording
    step_time_s: Times  #: mean step times
    slowdown: Slowdown | None  #: S = T(original) / T(ideal)
    slowdown_error: Amount | None  #: half the width of its 95 % interval; null if the steps are too few to tell
    waste: AtMostOne | None  #: 1 - 1/S; below 0 where the ideal job would be slower
    straggling: bool  #: S is at least 1.1
    wasted_gpu_hours: Amount | None  #: GPU-hours lost in the traced steps, at least 0
    wasted_gpu_hours_per_day: Amount | None  #: GPU-hours that a day at this rate loses, at least 0
    #: what figures of GPU-hours a day take for granted; empty if too little was recorded for them: then ignore them
    assumptions: list[str]
    #: why the job is slow, costliest first; one of kind `healthy` or `unexplained` where none shows, but in
    #: post-training
    findings: list[Finding] = msgspec.field(name="causes")
    #: what to do about it: fixes for a named cause, then what any job could try, each by what it saves, bounds
    #: included; the combination last
    fixes: list[Fix]
    patterns: Patterns  #: how the slowdown runs over steps and workers
    stalls: list[Stall]  #: isolated slow steps, longest first
    #: the detectors of plug-ins that were left out of this report, and why
    #: ([Extending](extending.md#if-a-plug-in-fails))
    problems: list[str]
    failed: list[str]  #: kinds of the detectors of plug-ins that failed on this job
    lacks: list[Lack]  #: what its source cannot show: conclusions that need it are not drawn
    questions: list[Question]  #: what if ops were as fast as their peers: `--fix` in the order asked, then `--keep`
    by_label: list[OfLabel]  #: S by the labels of `--by` in the order asked, costliest first
    by_kind: list[Contribution]  #: op kinds, worst first
    by_step: list[OfStep]  #: steps in order
    critical_path: list[OnPath]  #: what the critical path consists of, most of the step first
    remarks: list[Remark]  #: what else a reader must know: `name` of each and its `words`
    overview: list[Table]  #: the tables of the first screen, in words; empty for pipelines without `--bubbles`
    asked: list[Section]  #: the tables and pictures that answer `--fix`, `--keep`, `--by`, `--overlap` and `--experts`
    #: all tables and pictures of `--full`: phases and requests of post-training, a step of the pipeline with
    #: `--bubbles`, uneven loads of experts; empty for other pipelines
    sections: list[Section]
    method: Maybe[MethodUsed] = UNSET  #: pipelines: the rules of the analysis
    #: which clocks were off; of a recording, the clock of each rank
    clocks: Maybe[ClockReport | list[ClockOfRank]] = UNSET
    posting: Maybe[PostingRule] = UNSET  #: pipelines: when receives are posted
    coverage: Maybe[Coverage] = UNSET  #: pipelines: how much of the job was traced
    bubbles: Maybe[Bubbles | None] = UNSET  #: pipelines: where stages are idle; null without `--bubbles`
    overlap: Maybe[Overlap] = UNSET  #: recordings, with `--overlap`: compute and communication at once
    experts: Maybe[Experts] = UNSET  #: with `--experts`: loads of experts
    #: pipelines: share of the loss that the slowest 3 % of the workers (at least one) give back when idealised
    m_w: Maybe[Number] = UNSET
    m_s: Maybe[Number] = UNSET  #: pipelines: the same for the last stage
    slowest_workers: Maybe[list[Worker]] = UNSET  #: pipelines: the workers of `m_w`, slowest first
    by_pp_rank: Maybe[list[Contribution]] = UNSET  #: pipelines: pipeline stages in order
    by_dp_rank: Maybe[list[Contribution]] = UNSET  #: pipelines: data-parallel ranks in order
    by_worker: Maybe[list[OfWorker]] = UNSET  #: pipelines: workers, worst first
    critical_workers: Maybe[list[OnPath]] = UNSET  #: pipelines: workers on the critical path, most of the step first
    forward_backward_correlation: Maybe[list[Correlation]] = UNSET  #: pipelines: stages in order
    by_rank: Maybe[list[OfRank]] = UNSET  #: op traces and recordings: ranks in order
    #: recordings: the steps that the profiler marked, in order; none if it marked none
    marked_steps: Maybe[list[MarkedStep]] = UNSET
    #: op traces and recordings: kinds of ops on the critical path, most of the step first; empty if ops have no kind
    critical_kinds: Maybe[list[OnPath]] = UNSET
    #: op traces and recordings: ranks on the critical path, most of the step first
    critical_ranks: Maybe[list[OnPath]] = UNSET
    gaps: Maybe[list[MissingMembers]] = UNSET  #: op traces and recordings: collectives with missing members
    #: recordings: the same as `step_time_s`, because all of it was replayed at once
    recording_time_s: Maybe[Times] = UNSET
    collectives: Maybe[Collectives] = UNSET  #: recordings: which kernels belong together
    wait_for: Maybe[list[WaitFor]] = UNSET  #: recordings: which rank waited for which
    kernel_classes: Maybe[list[Kernels]] = UNSET  #: recordings: classes of kernels over all ranks, most time first
    unknown_kernels: Maybe[list[Kernels]] = UNSET  #: recordings: the 20 longest kernels that no class matches
    #: recordings of one rank: what its GPU did, why it was idle, and what to do about it
    #: ([definitions](kineto.md#one-gpu))
    gpu: Maybe[GpuInReport] = UNSET
    #: with `--gpu`, the answers in the order asked; then, of recordings of several ranks, the same as `gpu` for each,
    #: at most 16
    gpus: Maybe[list[GpuInReport | OnGpu]] = UNSET
    metrics: Maybe[MetricsInReport] = UNSET  #: with `--metrics`: what metrics of the machines say of the culprits
    #: jobs in a store, without `--window`: what all windows lost; the rest of the report is about the newest
    run: Maybe[RunVerdict] = UNSET
    step_s: Maybe[Seconds] = UNSET  #: post-training: the step
    length_s: Maybe[Seconds] = UNSET  #: post-training: all steps together, those that warm up included
    replayed_s: Maybe[Seconds | None] = UNSET  #: post-training: the step as replayed; null for a log
    generation_s: Maybe[Seconds | None] = UNSET  #: post-training: the generation; null if the log has only a part of it
    #: post-training: from the end of a sync to the start of the next training; null for a log
    trainer_wait_s: Maybe[Number] = UNSET
    #: post-training: updates that the weights of a generation lag behind; null if the log does not tell
    staleness: Maybe[Count | None] = UNSET
    phases: Maybe[list[PhaseTime]] = UNSET  #: post-training: the longest first
    #: post-training: the step minus its phases (if generation runs beside the others, minus the longer of both); null
    #: if the step was logged as the sum of its phases
    unaccounted_s: Maybe[Number] = UNSET
    #: post-training: why times contradict each other: phases longer than the step, an engine's clock; then there are no
    #: losses
    flagged: Maybe[str | None] = UNSET
    #: post-training: why there are no prices: `flagged`, or the replay misses the step, or the median request of an
    #: engine, by more than 5 %; null if there are
    doubt: Maybe[str | None] = UNSET
    losses: Maybe[list[LossTime]] = UNSET  #: post-training: what each loss costs; of logs, `reward` and `sync` alone
    leading: Maybe[Loss | None] = UNSET  #: post-training: the largest loss, if it is at least 5 % of the step
    generation: Maybe[Generation | None] = UNSET  #: post-training: how engines decode; null without trajectories
    #: post-training: the alternatives: of `rl`, `--what-if`, of `whatif`, `--fix`; by default the usual ones
    what_if: Maybe[list[Price]] = UNSET
    #: post-training: numbers of steps that are left out: they lack their record, the time of the step, or that of a
    #: phase that others have
    left_out: Maybe[list[Ordinal]] = UNSET
    #: post-training: steps that a later attempt logged again; from each on, that one counts
    restarts: Maybe[list[Ordinal]] = UNSET
    #: post-training: of a log: the steps that differ from the others, and how the others change; null with recorded
    #: times
    unlike: Maybe[Unlike | None] = UNSET
    #: post-training: of a log of a job that generates while it trains: how much each side idles
    sides: Maybe[Sides | None] = UNSET
    #: post-training: of a log with times of tool calls: at most how much tools cost
    tools: Maybe[ToolsBound | None] = UNSET

    def __repr__(self) -> str:
        return f"<Report on {short(self.name)}: {self.verdict.kind}, {self.answer.headline}>"

    def _repr_html_(self) -> str:
        from tracekit.dashboards.documents.card import card  # the one import upwards

        return card(self)

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.job.name

    @property
    def daily(self) -> bool:
        """Whether enough was recorded to say what a day costs."""
        return bool(self.assumptions)

    @property
    def caveat(self) -> str:
        """What stands before the kind of a loss in every output: empty if the report is to be believed."""
        believed = self.trust.trustworthy or self.verdict.kind is LossKind.CONTRADICTION
        return "" if believed else "NOT TRUSTED, looks like "

    @property
    def judged(self) -> bool:
        """Whether it shows how the job is doing."""
        return self.trust.trustworthy and self.verdict.kind is not LossKind.CONTRADICTION

    @property
    def alarming(self) -> tuple[CauseInWords, ...]:
        """Causes to tell a person about: those of a headline loss that are each large enough to be a headline."""
        if not self.judged or self.verdict.kind in (LossKind.BALANCED, LossKind.MINOR):
            return ()
        return tuple(account for account in self.answer.accounts if account.share >= SMALLEST_ALARMING_SHARE)

    @property
    def accused(self) -> Accused:
        """The ranks to blame, as scripts get them."""
        return Accused(self.name, self.trust.trustworthy, self.answer.trust, self.answer.culprits)

    @property
    def leading_finding(self) -> Finding | None:
        """The first cause of the largest loss that has one; None if no loss has a known cause."""
        return next((self.findings[loss.causes[0]] for loss in self.verdict.losses if loss.causes), None)

    @property
    def first_fix(self) -> Fix | None:
        """The fix to begin with; None if none is known."""
        return None if self.verdict.first_fix is None else self.fixes[self.verdict.first_fix]

    @property
    def saved_gpu_hours_per_day(self) -> float | None:
        """GPU-hours a day that the fix to begin with saves, as `answer.saves` has them; None if it promises none."""
        fix, leading = self.first_fix, self.leading_finding
        if fix is None or fix.withheld is not None or leading is None or leading.once is not None:
            return None
        return fix.saved_gpu_hours_per_day

    @property
    def slowdown_text(self) -> str:
        """S with its error, as people read it."""
        return slowdown_with_error(self.slowdown, self.slowdown_error)

    @property
    def steps_in_whole(self) -> int:
        """The number of training steps that the times are of: 1, or all of a recording."""
        return max(self.job.steps, 1) if self.job.whole == "recording" else 1

    @property
    def unit(self) -> str:
        """What times are compared by: "step", or "recording" if it is not divided into several."""
        return self.job.whole if self.steps_in_whole == 1 else "step"

    @property
    def worst_step(self) -> OfStep:
        """The step that loses most; where none loses anything, the longest."""
        return max(self.by_step, key=lambda row: (row.lost_s or 0.0, row.recorded_s))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of the steps that log tokens; None if none does."""
        return tokens_per_s((row.tokens, row.recorded_s) for row in self.by_step)

    @property
    def gpu_of_ranks(self) -> list[GpuInReport]:
        """What the GPU of each rank of a recording did."""
        return [self.gpu] if self.gpu else [gpu for gpu in self.gpus or () if isinstance(gpu, GpuInReport)]

    @property
    def on_gpus(self) -> list[OnGpu]:
        """What the job takes on the GPUs that were asked for, in their order."""
        return [gpu for gpu in self.gpus or () if isinstance(gpu, OnGpu)]

    @property
    def parts(self) -> list[Section]:
        """All that a renderer draws of it: the metrics of culprits over those of their peers, and its sections."""
        return [*(self.metrics.pictures if self.metrics else ()), *self.sections]

    @property
    def pictures(self) -> list[Picture]:
        """The parts that are no tables."""
        return [part for part in self.parts if not isinstance(part, Table)]

    @property
    def tables_of_sections(self) -> list[Table]:
        """The sections that are tables."""
        return [part for part in self.sections if isinstance(part, Table)]

    def step_times(self) -> StepTimes:
        """The times of each step."""
        rows = self.by_step
        return StepTimes(
            np.array([row.step for row in rows], np.int32),
            np.array([row.recorded_s for row in rows]),
            np.array([row.original_s for row in rows]),
            np.array([row.ideal_s for row in rows]),
        )

    def worker_grid(self) -> WorkerGrid:
        """S of each worker of a pipeline."""
        rows = {Worker(row.dp_rank, row.pp_rank): row for row in self.by_worker or ()}
        dp_ranks = sorted({worker.dp_rank for worker in rows})
        stages = 1 + max((worker.pp_rank for worker in rows), default=-1)
        values = [[rows[Worker(dp_rank, stage)].slowdown for stage in range(stages)] for dp_rank in dp_ranks]
        return WorkerGrid(tuple(dp_ranks), np.array(values), rows)

    @property
    def table_names(self) -> tuple[str, ...]:
        """The names for `table`."""
        worker_tables = PIPELINE_TABLES if self.by_worker is not UNSET else ()
        return (*worker_tables, *COMMON_TABLES, *(_POST_TRAINING_TABLES if self.losses is not UNSET else ()))

    def table(self, name: str) -> pl.DataFrame:
        """The table of that name (see `table_names`). Raises SelectionError for another name."""
        if name not in self.table_names:
            raise SelectionError(f"no table {name!r}; there are {', '.join(self.table_names)}")
        field = {"causes": "findings", "alternatives": "what_if"}.get(name, name)
        return frame_of(getattr(self, field), row_type(Report, field), _LEFT_OUT.get(name, ()))

    def frames(self) -> dict[str, pl.DataFrame]:
        """Every table by name, as `write_csv` writes them."""
        tables = {name: self.table(name) for name in self.table_names}
        return tables | (questions.frames(self.bubbles) if self.bubbles else {})

    def pandas(self, name: str) -> pandas.DataFrame:
        """The table of that name as a pandas frame. Raises MissingExtraError if pandas is not installed."""
        with extra("pandas", "a frame of pandas"):
            return self.table(name).to_pandas()

    def write_csv(self, directory: str | os.PathLike[str]) -> None:
        """Write every table as a CSV file into `directory`, which is created if needed.

        Text that a spreadsheet would take for a formula gets a leading apostrophe. Raises OutputError. An existing CSV
        file is replaced only if it has the header of the same table.
        """
        write_tables(self.frames(), directory)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, as documented in docs/report-schema.md."""
        content: dict[str, Any] = msgspec.json.decode(self.to_json())
        return content

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return msgspec.json.encode(self).decode()


def write_tables(tables: dict[str, pl.DataFrame], directory: str | os.PathLike[str]) -> None:
    """Write tables by name as CSV files: see `Report.write_csv`."""
    from tracekit.base.atomic_write import replacing  # most reports write none

    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created: {error.strerror}; choose another directory") from None
    with ExitStack() as files:  # all of them or, if one fails, none
        for name, table in tables.items():
            kind = csv_kind("this table of tracekit", table.columns)
            files.enter_context(replacing(folder / f"{name}.csv", kind)).write_text(safe_csv(table), "utf-8")


def slowdown_with_error(slowdown: float | None, error: float | None) -> str:
    """S with its error, as people read it."""
    value = math.nan if slowdown is None else slowdown
    return f"{value:.3f}" + ("" if error is None or math.isnan(error) else f" \u00b1 {error:.3f}")


class Versioned(Struct, frozen=True):
    """What reports of all versions have."""

    report_version: int


def decoded(content: bytes, name: str) -> Report:
    """The report in `content`, called `name` in errors. Raises FormatError."""
    try:
        version = msgspec.json.decode(content, type=Versioned).report_version
        if version != REPORT_VERSION:
            raise FormatError(
                f"{name}: a report of version {version}, and this tracekit reads version {REPORT_VERSION}; analyse the"
                " trace again, with --json"
            )
        return msgspec.json.decode(content, type=Report)
    except msgspec.ValidationError as error:
        raise FormatError(f"{name}: not a report as tracekit writes it ({error}); print it again with --json") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{name}: not whole JSON ({error}); copy the report again") from None
