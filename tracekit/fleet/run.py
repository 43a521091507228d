"""A run: every source that is new or has changed is analysed, and the tables of the study are made.

In: sources, a study and an executor. Out: a `RunSummary`, and the study.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tracekit import __version__
from tracekit.fleet.executor import Executor, Outcome, Task
from tracekit.fleet.sources import Source
from tracekit.fleet.study import SeenLog, Study

#: What a change in makes another analysis: the modules that read a trace and find out what is stored of it.
_ANALYSIS = ("analysis", "collectors/importers", "collectors/merge", "fleet/rows.py", "fleet/tables.py",
             "fleet/exclusions.py")  # fmt: skip
Progress = Callable[["Standing"], None]


@dataclass(slots=True)
class Standing:
    """How far a run is. `done` of `total` sources have an outcome; `failed`: by rule, as far as nothing lasting."""

    total: int
    done: int = 0
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run did. `unchanged`: sources that were as the study has them. `outcomes`: of all others."""

    sources: int
    unchanged: int
    outcomes: Sequence[Outcome]

    @property
    def failed(self) -> Counter[str]:
        """How many sources have nothing lasting, by rule."""
        return Counter(one.rule for one in self.outcomes if one.rule is not None)


@cache
def analysis_version() -> str:
    """Tracekit's version and a digest of the modules that analyse: another one makes other figures, perhaps."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=4)
    for name in _ANALYSIS:
        place = package / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return f"{__version__}-{digest.hexdigest()}"


def run_study(
    study: Study, sources: Sequence[Source], executor: Executor, progress: Progress = lambda _: None
) -> RunSummary:
    """Analyse what is new or changed, and make the tables. Raises StudyError, OutputError."""
    analysis = analysis_version()
    with study.running(analysis) as log:
        seen, done = study.seen(), study.analysed(analysis)
        todo = [source for source in sources if not _is_done(source, seen, done)]
        outcomes = _analyse(study, todo, executor, analysis, log, progress)
        failed = {one.url: one for one in outcomes if one.rule is not None}
        if outcomes or any(study.results.iterdir()):
            study.fold(analysis, failed, {source.url for source in todo})
    return RunSummary(len(sources), len(sources) - len(todo), outcomes)


def _is_done(source: Source, seen: dict[str, tuple[str, str]], done: set[str]) -> bool:
    stamp, digest = seen.get(source.url, ("", ""))
    return stamp == source.stamp != "" and digest in done


def _analyse(
    study: Study, todo: Sequence[Source], executor: Executor, analysis: str, log: SeenLog, progress: Progress
) -> list[Outcome]:
    """An outcome for each source. What ended its process is tried once more, alone: perhaps memory was short."""
    of_url = {source.url: source for source in todo}
    standing = Standing(len(todo))

    def taken(outcomes: Iterable[Outcome], *, last: bool) -> list[Outcome]:
        kept = []
        for outcome in outcomes:
            log.add(of_url[outcome.url], outcome)
            kept.append(outcome)
            if last or not outcome.died:
                standing.done += 1
                standing.failed.update([outcome.rule] if outcome.rule is not None else [])
                progress(standing)
        return kept

    largest_first = sorted(todo, key=lambda source: (-source.bytes, source.url))
    progress(standing)
    first = taken(executor.run([Task(one, str(study.path), analysis) for one in largest_first]), last=False)
    again = sorted(one.url for one in first if one.died)
    second = taken(
        executor.run([Task(of_url[url], str(study.path), analysis) for url in again], alone=True), last=True
    )  # fmt: skip
    return sorted((*(one for one in first if not one.died), *second), key=lambda one: one.url)
