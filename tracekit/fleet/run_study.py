"""A run: analyse every new or changed source, and build the tables of the study.

In: sources, a study and an executor. Out: a `RunSummary`, and the study.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tracekit import __version__
from tracekit.fleet.executor import Executor, Task, TaskOutcome
from tracekit.fleet.sources import StudySource
from tracekit.fleet.study import SeenLog, Study

#: Folders whose code does not affect stored figures: they record jobs or show results. All other code counts as
#: analysis, so a new module counts without being listed.
_NO_ANALYSIS = frozenset({"commands", "dashboards", "documents", "figures", "launch", "live", "synth", "terminal"})
_CODE = frozenset({".py", ".c", ".h"})
Progress = Callable[["Standing"], None]


@dataclass(slots=True)
class Standing:
    """Progress of a run. `done` of `total` sources have an outcome; `failed`: sources without a lasting result, by
    rule.
    """

    total: int
    done: int = 0
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The outcome of a run. `unchanged`: sources that were as in the study. `outcomes`: of all others."""

    sources: int
    unchanged: int
    outcomes: Sequence[TaskOutcome]

    @property
    def failed(self) -> Counter[str]:
        """The number of sources without a lasting result, by rule."""
        return Counter(one.rule for one in self.outcomes if one.rule is not None)


@cache
def analysis_version() -> str:
    """Tracekit's version and a digest of the analysis code: if it differs, the figures may differ."""
    digest = hashlib.blake2b(digest_size=4)
    for path in analysing_files():
        digest.update(path.read_bytes())
    return f"{__version__}-{digest.hexdigest()}"


def analysing_files() -> Iterator[Path]:
    """The code that reads a trace and computes what is stored about it, in a fixed order."""
    for root, folders, files in os.walk(Path(__file__).parents[1], followlinks=True):
        folders[:] = sorted(set(folders) - _NO_ANALYSIS)
        yield from (Path(root, name) for name in sorted(files) if Path(name).suffix in _CODE)


def run_study(
    study: Study, sources: Sequence[StudySource], executor: Executor, progress: Progress = lambda _: None
) -> RunSummary:
    """Analyse what is new or changed, and build the tables. Raises StudyError, OutputError."""
    analysis = analysis_version()
    with study.running(analysis) as log:
        seen, done = study.seen(), study.analysed(analysis)
        todo = [source for source in sources if not _is_done(source, seen, done)]
        outcomes = _analyse(study, todo, executor, analysis, log, progress)
        failed = {one.url: one for one in outcomes if one.rule is not None}
        if outcomes or study.unfinished:
            study.fold(analysis, failed, {source.url for source in todo})
    return RunSummary(len(sources), len(sources) - len(todo), outcomes)


def _is_done(source: StudySource, seen: dict[str, tuple[str, str]], done: set[str]) -> bool:
    stamp, digest = seen.get(source.url, ("", ""))
    return stamp == source.stamp != "" and digest in done


def _analyse(
    study: Study, todo: Sequence[StudySource], executor: Executor, analysis: str, log: SeenLog, progress: Progress
) -> list[TaskOutcome]:
    """An outcome for each source. A source that ended its process is retried alone: memory may have been short."""
    of_url = {source.url: source for source in todo}
    standing, outcomes = Standing(len(todo)), list[TaskOutcome]()
    progress(standing)
    waiting = sorted(of_url, key=lambda url: (-of_url[url].bytes, url))
    for last in (False, True):
        again = []
        for outcome in executor.run([Task(of_url[url], str(study.path), analysis) for url in waiting], alone=last):
            log.add(of_url[outcome.url], outcome)
            if outcome.died and not last:
                again.append(outcome.url)
                continue
            outcomes.append(outcome)
            standing.done += 1
            standing.failed.update([outcome.rule] if outcome.rule is not None else [])
            progress(standing)
        waiting = sorted(again)
    return sorted(outcomes, key=lambda outcome: outcome.url)
