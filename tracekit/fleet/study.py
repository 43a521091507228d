"""The folder of a study, and a run, which analyses every new or changed source and builds the tables.

    STUDY/tracekit-study           says that this folder is a study
    STUDY/<table>/part-?.parquet   the tables (`study_tables`) in 16 parts, by the first digit of a job's digest
    STUDY/.run/seen.jsonl          which content each source had, a line as each is done
    STUDY/.run/results/            rows of jobs that are not in the tables yet, a file for each trace
    STUDY/.run/lock                locked while a run is under way

Every file is replaced whole. Tables are made of results and of the previous tables, so an interrupted step can be
repeated; results are removed only once they are in the tables. The same sources make the same bytes, regardless of
order, number of processes and interruptions.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec
import polars as pl

from tracekit import __version__
from tracekit.base.contained import Contained
from tracekit.base.errors import OutputError, StudyError, UnsafeFileError
from tracekit.base.paths import command
from tracekit.fleet.sources import StudySource
from tracekit.fleet.study_tables import BY_JOB, EVERYWHERE, STUDY_VERSION, TABLES, frame
from tracekit.fleet.tasks import Executor, Task, TaskOutcome
from tracekit.sources.registry import STUDY_MARK

PARTS = "0123456789abcdef"
_ROW_GROUP = 1 << 17
_LOCK, _SEEN, _RESULTS = ".run/lock", ".run/seen.jsonl", ".run/results"
_SUFFIX, _UNFINISHED = ".result", ".unfinished"
_MARK_TEXT = json.dumps({"study_version": STUDY_VERSION, "made_by": "tracekit fleet run"}) + "\n"
#: Folders whose code does not affect stored figures: they record jobs or show results. All other code counts as
#: analysis, so a new module counts without being listed.
_NO_ANALYSIS = frozenset({"commands", "dashboards", "documents", "figures", "launch", "live", "synth", "terminal"})
_CODE = frozenset({".py", ".c", ".h"})

Progress = Callable[["Standing"], None]


class _Mark(msgspec.Struct):
    study_version: int


class Study:
    """The study in the folder `path`. Methods raise StudyError if it is not one, OutputError if they cannot write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: What reads and changes the files.
        self.contained = Contained(path)

    def _parts(self, table: str, parts: str = PARTS) -> list[Path]:
        """The existing files of these parts of a table."""
        names = [_name(table, part) for part in parts]
        return [self.path / name for name in names if self.contained.status(name) is not None]

    # ---- reading

    @property
    def unfinished(self) -> bool:
        """True if a run left results that are not in the tables, or is under way."""
        return bool(self.contained.files(_RESULTS))

    def check(self) -> None:
        """Raise StudyError if there is no study that this tracekit can read."""
        try:
            mark = self.contained.read(STUDY_MARK)
        except OSError:
            raise StudyError(
                f"{self.path}: not a study; create one with `{command('fleet', 'run', 'SOURCES', '--out', self.path)}`"
            ) from None
        version = None
        with suppress(ValueError, RecursionError):
            version = msgspec.json.decode(mark, type=_Mark).study_version
        if version != STUDY_VERSION:
            raise StudyError(
                f"{self.path}: a study of version {version!r:.20}; this tracekit reads version {STUDY_VERSION}: upgrade"
                " tracekit"
            )

    def state(self) -> tuple[tuple[str, int, int], ...]:
        """Every table file with its size and time, which changes whenever a table does."""
        names = [_name(table, part) for table in TABLES for part in PARTS]
        status = {name: self.contained.status(name) for name in names}
        return tuple((name, file.st_size, file.st_mtime_ns) for name, file in status.items() if file is not None)

    def table(self, name: str) -> pl.LazyFrame:
        """A table, lazily; without rows before the first run."""
        files = self._parts(name)
        if not files:
            return pl.LazyFrame(schema=TABLES[name])
        return pl.scan_parquet(files, glob=False)

    def read(self, name: str, columns: list[str] | None = None) -> pl.DataFrame:
        """A table, or some columns of it. Raises StudyError if a file is damaged."""
        try:
            table = self.table(name)
            return (table if columns is None else table.select(columns)).collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise StudyError(
                f"{self.path / name}: cannot be read ({str(error).splitlines()[0]:.200}); copy it again, or remove the"
                " damaged file and run `tracekit fleet run` with its sources again"
            ) from None

    def has(self, digest: str, analysis: str) -> bool:
        """True if a content has been analysed, in the tables or not."""
        if self.contained.status(_result_name(digest, analysis)) is not None:
            return True
        is_job = (pl.col("job") == digest) & (pl.col("analysis") == analysis)
        parts = (*self._parts("jobs", digest[0]), *self._parts("exclusions", PARTS[0]))
        return any(
            not pl.scan_parquet(part, glob=False).filter(is_job).select("job").head(1).collect().is_empty()
            for part in parts
        )

    def analysed(self, analysis: str) -> set[str]:
        """The contents that have been analysed, in the tables or not."""
        wanted = pl.col("analysis") == analysis
        done = {digest for digest, _ in self._waiting(analysis)}
        for table in ("jobs", "exclusions"):
            done |= set(self.table(table).filter(wanted).select("job").drop_nulls().collect()["job"])
        return done

    def seen(self) -> dict[str, tuple[str, str]]:
        """StudySource -> its stamp and the digest of its content when it was last read."""
        seen: dict[str, tuple[str, str]] = {}
        with suppress(FileNotFoundError):
            for line in self.contained.read(_SEEN).splitlines():
                with suppress(ValueError, RecursionError):  # its writer was killed: the source is read again
                    url, stamp, digest = msgspec.json.decode(line, type=tuple[str, str, str])
                    seen[url] = stamp, digest
        return seen

    # ---- writing

    @contextmanager
    def running(self, analysis: str) -> Iterator[None]:
        """The one run of this study. Raises StudyError if there is another, or the folder is something else."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self.contained.status(STUDY_MARK) is None and any(self.path.iterdir()):
                raise StudyError(f"{self.path}: neither empty nor a study; choose another --out")
            for folder in (".run", *TABLES):
                for line in self.contained.unsafe(folder, deep=True):
                    raise UnsafeFileError(line)
            self.contained.make_folder(_RESULTS)
            with open(self.contained.open(_LOCK, os.O_RDWR | os.O_CREAT), "rb") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise StudyError(f"{self.path}: another run is writing this study; wait for it") from None
                if self.contained.status(STUDY_MARK) is None:
                    self._replace_file(STUDY_MARK, _MARK_TEXT.encode())
                self.check()
                list(self._waiting(analysis))  # removes unfinished results and those of another analysis
                yield
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def log_seen(self, source: StudySource, outcome: TaskOutcome) -> None:
        """Note the content of a source, so that a run after a killed one need not read it again. Raises OSError."""
        if outcome.digest is not None:
            self.contained.append(_SEEN, _line(source.url, outcome.stamp, outcome.digest))

    def write_result(self, digest: str, analysis: str, rows: Mapping[str, pl.DataFrame]) -> None:
        """Write the rows of a job that are not in the tables yet. Raises OSError, and then leaves nothing behind."""

        def write(file: BinaryIO) -> None:
            with zipfile.ZipFile(file, "w") as archive:
                for table, frame in rows.items():
                    buffer = io.BytesIO()
                    frame.write_ipc(buffer, compression="zstd")
                    archive.writestr(table, buffer.getvalue())

        name = _result_name(digest, analysis)
        self.contained.put_by(name, f"{name}-{os.getpid()}{_UNFINISHED}", write)

    def _result(self, name: str) -> dict[str, pl.DataFrame] | None:
        """The rows of a job; None if the file is damaged, which also removes it."""
        try:
            # It checks the CRC of every member.
            with self.contained.reading(name) as file, zipfile.ZipFile(file) as archive:
                rows = {table: pl.read_ipc(io.BytesIO(archive.read(table))) for table in archive.namelist()}
        except (zipfile.BadZipFile, pl.exceptions.PolarsError, EOFError):
            rows = {"": pl.DataFrame()}
        if any(table not in TABLES or frame.schema != TABLES[table] for table, frame in rows.items()):
            self.contained.remove(name)
            return None
        return rows

    def _waiting(self, analysis: str) -> Iterator[tuple[str, str]]:
        """Digest and name of every result of this analysis, in order. Removes those of others and unfinished ones."""
        for name in self.contained.files(_RESULTS):
            digest, _, rest = name.partition("-")
            if rest == f"{analysis}{_SUFFIX}":
                yield digest, f"{_RESULTS}/{name}"
            else:
                self.contained.remove(f"{_RESULTS}/{name}")

    def fold(self, analysis: str, failed: Mapping[str, TaskOutcome], tried: set[str]) -> None:
        """Put all results into the tables, then remove them. Raises OutputError.

        `failed`: outcomes without a lasting result, by source. `tried`: all sources of this run.
        """
        before = {row["source"]: row["job"] for row in self.read("sources").to_dicts()}
        digests = before | {url: digest for url, (_, digest) in self.seen().items() if url not in failed}
        results = dict(self._waiting(analysis))
        wanted = set(digests.values())
        dropped = set(before.values()) - wanted
        first = _first_source(digests)
        left_out = [self._old_exclusions(wanted - results.keys(), set(failed) | tried)]
        for part in PARTS:
            part_results = {digest: name for digest, name in results.items() if digest[0] == part}
            if part_results or any(digest[0] == part for digest in dropped):
                left_out += self._fold_part(part, part_results, wanted)
        left_out.append(_failures([outcome for url, outcome in failed.items() if url not in digests]))
        exclusions = pl.concat(left_out).with_columns(
            source=pl.coalesce("source", pl.col("job").replace_strict(first, default=None, return_dtype=pl.String))
        )
        self._write("exclusions", exclusions.sort("job", "source", "rule", nulls_last=True))
        sources = frame("sources", {"source": sorted(digests), "job": [digests[url] for url in sorted(digests)]})
        self._write("sources", sources)
        for name in results.values():
            self.contained.remove(name)
        self._forget(digests)

    def _fold_part(self, part: str, results: Mapping[str, str], wanted: set[str]) -> list[pl.DataFrame]:
        """Put results into one part of the tables, and drop the jobs that no source has; returns their exclusions."""
        read = {digest: rows for digest, name in results.items() if (rows := self._result(name)) is not None}
        keep = pl.col("job").is_in(list(wanted - read.keys()))
        for table, schema in BY_JOB.items():
            old = [pl.read_parquet(path, glob=False).filter(keep) for path in self._parts(table, part)]
            new = [rows[table] for digest, rows in read.items() if table in rows and digest in wanted]
            merged = pl.concat([pl.DataFrame(schema=schema), *old, *new])
            self._write(table, merged.sort("job", maintain_order=True), part)
        return [rows["exclusions"] for digest, rows in read.items() if digest in wanted]

    def _old_exclusions(self, unchanged: set[str], tried: set[str]) -> pl.DataFrame:
        """Exclusions of jobs that stay as they are, and of sources that failed earlier and were not tried now."""
        is_unchanged = pl.col("job").is_in(list(unchanged))
        return self.read("exclusions").filter(
            is_unchanged | (pl.col("job").is_null() & ~pl.col("source").is_in(list(tried)))
        )

    def _write(self, table: str, rows: pl.DataFrame, part: str = PARTS[0]) -> None:
        self.contained.make_folder(table)
        buffer = io.BytesIO()  # first, because polars reports a full disk as damage
        rows.rechunk().write_parquet(buffer, compression="zstd", row_group_size=_ROW_GROUP, statistics=True)
        self._replace_file(_name(table, part), buffer.getvalue())

    def _replace_file(self, name: str, content: bytes) -> None:
        """Write a complete file in place of the existing one. Raises OutputError."""
        try:
            self.contained.put(name, content)
        except OSError as error:
            raise _cannot_write(self.path / name, error) from None

    def _forget(self, current: Mapping[str, str]) -> None:
        """Reduce the log of seen sources to one line per source."""
        lines = [_line(url, stamp, digest) for url, (stamp, digest) in sorted(self.seen().items()) if url in current]
        self._replace_file(_SEEN, b"".join(lines))


def _name(table: str, part: str) -> str:
    return f"{table}/part-{part}.parquet"


def _result_name(digest: str, analysis: str) -> str:
    return f"{_RESULTS}/{digest}-{analysis}{_SUFFIX}"


def _line(url: str, stamp: str, digest: str) -> bytes:
    return json.dumps([url, stamp, digest]).encode() + b"\n"


def _first_source(digest_of_url: Mapping[str, str]) -> dict[str, str]:
    """Content -> the first source with it, by name."""
    first: dict[str, str] = {}
    for url in sorted(digest_of_url):
        first.setdefault(digest_of_url[url], url)
    return first


def _failures(outcomes: list[TaskOutcome]) -> pl.DataFrame:
    columns = {
        "source": [outcome.url for outcome in outcomes],
        "rule": [outcome.rule for outcome in outcomes],
        "scope": [EVERYWHERE] * len(outcomes),
        "reason": [outcome.reason for outcome in outcomes],
    }
    return frame("exclusions", columns)


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{path}: cannot be written: {error.strerror or error}; make room or correct permissions, and run again"
    )


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
        return Counter(outcome.rule for outcome in self.outcomes if outcome.rule is not None)


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
    with study.running(analysis):
        seen, done = study.seen(), study.analysed(analysis)
        pending = [source for source in sources if not _is_done(source, seen, done)]
        outcomes = _analyse(study, pending, executor, analysis, progress)
        failed = {outcome.url: outcome for outcome in outcomes if outcome.rule is not None}
        if outcomes or study.unfinished:
            study.fold(analysis, failed, {source.url for source in pending})
    return RunSummary(len(sources), len(sources) - len(pending), outcomes)


def _is_done(source: StudySource, seen: dict[str, tuple[str, str]], done: set[str]) -> bool:
    stamp, digest = seen.get(source.url, ("", ""))
    return stamp == source.stamp != "" and digest in done


def _analyse(
    study: Study, pending: Sequence[StudySource], executor: Executor, analysis: str, progress: Progress
) -> list[TaskOutcome]:
    """An outcome for each source. A source that ended its process is retried alone: memory may have been short."""
    source_of_url = {source.url: source for source in pending}
    standing, outcomes = Standing(len(pending)), list[TaskOutcome]()
    progress(standing)
    waiting = sorted(source_of_url, key=lambda url: (-source_of_url[url].bytes, url))
    for last in (False, True):
        tasks, retried = [Task(source_of_url[url], str(study.path), analysis) for url in waiting], []
        for outcome in executor.run(tasks, alone=last):
            study.log_seen(source_of_url[outcome.url], outcome)
            if outcome.died and not last:
                retried.append(outcome.url)
                continue
            outcomes.append(outcome)
            standing.done += 1
            standing.failed.update([outcome.rule] if outcome.rule is not None else [])
            progress(standing)
        waiting = sorted(retried)
    return sorted(outcomes, key=lambda outcome: outcome.url)
