"""The result of `whatif`: what a job loses, who causes it, why, what to do, and whether to believe it.

In: a `Diagnosis`, with what the source of the job adds. Out: `Report`, which every renderer draws: words
(`words.py`), tables, one JSON object (docs/report-schema.md), figures, and the card of a notebook.
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.attribution.attribution import STRAGGLING_SLOWDOWN, Trust, waste
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.numeric.means import ratio_margins
from tracekit.base.atomic_write import Kind, replacing, starting_with
from tracekit.base.errors import OutputError, SelectionError, extra
from tracekit.base.safe_csv import safe_csv
from tracekit.base.text import counted, short
from tracekit.report.answer import Answer
from tracekit.report.diagnosis import Diagnosis
from tracekit.report.finding import Finding
from tracekit.report.question import Question, label_table, question_table
from tracekit.report.section import Table
from tracekit.report.verdict import LossKind
from tracekit.trace.facts import Fact
from tracekit.trace.step_values import StepValues

if TYPE_CHECKING:
    import pandas

    from tracekit.analysis.evidence.graph_subject import GraphSubject
    from tracekit.job.pipeline_report import PipelineReport
    from tracekit.job.rl_report import RlReport
    from tracekit.report.experts import Experts, Overlap
    from tracekit.report.findings import Findings, WorkerSlowdowns
    from tracekit.report.question import ByLabel
    from tracekit.show.plots import Plots

#: Version of the JSON object; increased by one with every change that could break a reader of the version before.
REPORT_VERSION = 2
#: Tables of every report, of one row per finding or question.
COMMON_TABLES = ("by_step", "by_label", "questions", "causes", "fixes")


class StepTimes(Struct, frozen=True, eq=False):
    """Times of each step, seconds, [steps] each: as recorded; replayed without launch delays; without stragglers."""

    steps: Int32s
    recorded: Floats
    original: Floats
    ideal: Floats


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Report(ABC):
    """Everything that `Job.whatif` found out about one job, whatever its source.

        report = tracekit.load("job.parquet").whatif()
        report                                # in a notebook: answer, worker map, steps, causes, fixes
        report.answer.headline                # the same in words
        report.findings                       # why it is slow, the costliest first
        report.slowdown                       # S, 1.0 for a job without stragglers
        report.table("by_label")              # a polars frame; report.pandas("by_label")
        report.to_dict()                      # plain data, as docs/report-schema.md documents it

    `name`: of the job. `diagnosis`: why it is slow, and what to do. `questions_asked`, `labels_asked`: the answers to
    custom questions. `overlap`: None if nobody asked; `experts`: None if nobody asked (`experts_asked`) and no uneven
    loads are known. `step_values`: what the loop logs of its steps. `table_names`: the names for `table`.
    """

    table_names: ClassVar[tuple[str, ...]] = COMMON_TABLES
    name: str
    diagnosis: Diagnosis
    questions_asked: tuple[Question, ...] = ()
    labels_asked: tuple[ByLabel, ...] = ()
    overlap: Overlap | None = None
    experts: Experts | None = None
    experts_asked: bool = False
    step_values: StepValues = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Report on {short(self.name)}: {self.diagnosis.verdict.kind}, {self.diagnosis.answer.headline}>"

    def _repr_html_(self) -> str:
        from tracekit.show.card import fragment

        return fragment(self)

    @property
    @abstractmethod
    def sizes(self) -> str:
        """What was analysed, in words: layout or ranks, steps, ops."""

    @property
    @abstractmethod
    def gpus(self) -> int:
        """The number of GPUs of the job."""

    @property
    @abstractmethod
    def whole(self) -> str:
        """What the times are of: "step", or "recording" if all of it was replayed at once."""

    @property
    @abstractmethod
    def times_s(self) -> dict[str, float]:
        """The mean step, seconds: `recorded`; `original`, without launch delays; `ideal`, without stragglers."""

    def remarks(self) -> Iterator[tuple[str, str]]:
        """Yield what else a reader must know: names and sentences."""
        yield from (("Missing", lack.sentence) for lack in self.diagnosis.lacks if lack.fact is Fact.COMPUTE)
        yield from self.remarks_of_source()
        yield from (("" if number else "Plug-ins", problem) for number, problem in enumerate(self.diagnosis.problems))

    @abstractmethod
    def remarks_of_source(self) -> Iterator[tuple[str, str]]:
        """Yield the remarks that only reports on such a source have."""

    @abstractmethod
    def sections(self, *, full: bool = False) -> Iterator[Table]:
        """Yield the tables of the report that its source adds; `full`: all of them."""

    def asked_tables(self) -> Iterator[Table]:
        """Yield the tables that a reader asked for: answers to custom questions, and S by label."""
        if self.questions_asked:
            yield question_table(self.questions_asked, self.whole, daily=self.daily)
        yield from (label_table(group, peers=self.has_peers) for group in self.labels_wanted)

    @property
    def has_peers(self) -> bool:
        """Whether ranks can be compared with each other."""
        return True

    @property
    def labels_wanted(self) -> Sequence[ByLabel]:
        """Those of `labels_asked` that a reader asked for."""
        return self.labels_asked

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """The JSON that the source of the job adds; its `job` describes the job."""

    @property
    def pipeline(self) -> PipelineReport | None:
        """This report, if it has the lanes of a pipeline: workers, stages, steps."""
        return None

    @property
    def rl(self) -> RlReport | None:
        """This report, if it has phases and requests of post-training."""
        return None

    @property
    def ops_evidence(self) -> GraphSubject | None:
        """The ops of the job with its all-to-alls apart, None if it has none."""
        return None

    @property
    def trust(self) -> Trust:
        """Whether to believe the report, and why not."""
        return self.diagnosis.trust

    @property
    def doubt(self) -> str:
        """What stands before the kind of a loss in every output: empty if the report is to be believed."""
        believed = self.trust.trustworthy or self.diagnosis.verdict.kind is LossKind.CONTRADICTION
        return "" if believed else "NOT TRUSTED, looks like "

    @property
    def answer(self) -> Answer:
        """The answer in sentences."""
        return self.diagnosis.answer

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Why the job is slow, the costliest first."""
        return self.diagnosis.causes

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal): how much longer a step takes than if every op took its ideal time."""
        return self.times_s["original"] / self.times_s["ideal"] if self.times_s["ideal"] else math.nan

    @property
    def slowdown_error(self) -> float:
        """Half the width of the 95 % interval of S over the steps, nan if they are too few to tell."""
        times = self.step_times()
        return float(ratio_margins(times.original[:, None], times.ideal, times.original)[0])

    @property
    def slowdown_text(self) -> str:
        """S with its error, as people read it."""
        error = self.slowdown_error
        return f"{self.slowdown:.3f}" + ("" if math.isnan(error) else f" \u00b1 {error:.3f}")

    @property
    def straggling(self) -> bool:
        """Whether S >= 1.1."""
        return self.slowdown >= STRAGGLING_SLOWDOWN

    @property
    def waste(self) -> float:
        """The share of a step that stragglers cost, 1 - 1 / S."""
        return waste(self.slowdown) if self.slowdown else math.nan

    @property
    @abstractmethod
    def steps_traced(self) -> int:
        """The number of training steps that were analysed."""

    @property
    def daily(self) -> bool:
        """Whether enough was recorded to say what a day costs."""
        return all(lack.fact is not Fact.COMPUTE for lack in self.diagnosis.lacks)

    @property
    def assumptions(self) -> list[str]:
        """What figures of the report take for granted: those of GPU-hours a day, if they are told at all."""
        traced = "this recording" if self.whole != "step" else f"the {counted(self.steps_traced, 'traced step')}"
        return [f"GPU-hours a day: {counted(self.gpus, 'GPU')} running all day as in {traced}"] if self.daily else []

    @cached_property
    def by_label(self) -> pl.DataFrame:
        """Exact S of each value of the requested labels, costliest first."""
        from tracekit.report.plain_data import OfLabel, frame_of

        rows = [
            OfLabel(
                ",".join(group.labels), ",".join(map(str, share.values)), share.ops, share.slowdown, share.error,
                share.added_s, share.removed_s,
            )
            for group in self.labels_asked
            for share in group.shares
        ]  # fmt: skip
        return frame_of(rows, OfLabel)

    @cached_property
    def by_step(self) -> pl.DataFrame:
        """Slowdown and times of each step, the time that it loses according to the verdict, seconds, and its `tokens`
        and `loss` if the loop logs them.
        """
        times = self.step_times()
        return pl.DataFrame(
            {
                "step": times.steps,
                "slowdown": times.original / np.where(times.ideal > 0, times.ideal, np.nan),
                "recorded_s": times.recorded,
                "original_s": times.original,
                "ideal_s": times.ideal,
                "lost_s": self.diagnosis.verdict.step_lost_s,
            }
        ).with_columns(
            pl.col("step").replace_strict(values, default=None, return_dtype=pl.Float64).alias(name)
            for name, values in self.step_values.items()
        )

    @cached_property
    def questions(self) -> pl.DataFrame:
        """The custom questions and their answers."""
        from tracekit.report.plain_data import frame_of

        return frame_of(self.questions_asked, Question)

    @cached_property
    def causes(self) -> pl.DataFrame:
        """Why the job is slow, costliest first."""
        from tracekit.report.plain_data import Finding, frame_of

        return frame_of(
            self.diagnosis.causes, Finding, but=("signature", "effect", "bound", "saved_when_acting_s", "refuted_by")
        )

    @cached_property
    def fixes(self) -> pl.DataFrame:
        """What each fix would save, best first."""
        from tracekit.report.plain_data import Fix, fix_as_data, frame_of

        return frame_of([fix_as_data(fix) for fix in self.diagnosis.fixes], Fix, but=("edit",))

    def table(self, name: str) -> pl.DataFrame:
        """The table of that name (see `table_names`). Raises SelectionError for another name."""
        if name not in self.table_names:
            raise SelectionError(f"no table {name!r}; there are {', '.join(self.table_names)}")
        frame: pl.DataFrame = getattr(self, name)
        return frame

    def frames(self) -> dict[str, pl.DataFrame]:
        """Every table by name, as `write_csv` writes them."""
        return {name: self.table(name) for name in self.table_names}

    def pandas(self, name: str) -> pandas.DataFrame:
        """The table of that name as a pandas frame. Raises MissingExtraError if pandas is not installed."""
        with extra("pandas", "a frame of pandas"):
            return self.table(name).to_pandas()

    def write_csv(self, directory: str | os.PathLike[str]) -> None:
        """Write every table as a CSV file into `directory`, which is created if needed.

        Text that a spreadsheet would take for a formula gets a leading apostrophe. Raises OutputError. An existing CSV
        file is replaced only if it has the header of the same table.
        """
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder}: cannot be created: {error.strerror}; choose another directory") from None
        with ExitStack() as files:  # all of them or, if one fails, none
            for name, table in self.frames().items():
                kind = Kind("this table of tracekit", starting_with(f"{','.join(table.columns)}\n".encode()))
                files.enter_context(replacing(folder / f"{name}.csv", kind)).write_text(safe_csv(table), "utf-8")

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write exact S of every worker in every step. Raises SelectionError if the job has no such workers."""
        raise SelectionError(
            f"{short(self.name)}: exact S of each worker in each step is for pipelines; {path} not written"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, as documented in docs/report-schema.md; nan becomes null."""
        from tracekit.report.plain_data import report_as_dict

        return report_as_dict(self)

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @abstractmethod
    def step_times(self) -> StepTimes:
        """Return the times of each step."""

    @property
    @abstractmethod
    def workers(self) -> pl.DataFrame:
        """`dp_rank`, `pp_rank`, `rank`, `host`, `slowdown`: S of each worker alone, by rank. A job that is no pipeline
        has a worker for each rank, without coordinates.
        """

    @property
    def plot(self) -> Plots:
        """The report as Plotly figures. Raises SelectionError if the job is no pipeline."""
        raise SelectionError(f"{short(self.name)}: figures of workers and steps are for pipelines")

    def worker_slowdowns(self) -> WorkerSlowdowns | None:
        """Exact S of each worker in each step, None if the job has no workers."""
        return None

    def stored(self) -> Findings:
        """The part of this report that the store keeps."""
        from tracekit.report.findings import Findings

        return Findings(self.to_json(), self.worker_slowdowns())
