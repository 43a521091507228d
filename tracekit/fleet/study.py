"""The folder of a study: Parquet tables, and the state that a run needs to continue the last one.

    STUDY/tracekit-study           says that this folder is a study
    STUDY/<table>/part-?.parquet   the tables (`tables`) in 16 parts, by the first digit of a job's digest
    STUDY/.run/seen.jsonl          which content each source had, a line as each is done
    STUDY/.run/results/            rows of jobs that are not in the tables yet (`results`)
    STUDY/.run/lock                locked while a run is under way

Every file is replaced whole. Tables are made of results and of the previous tables, so an interrupted step can be
repeated; results are removed only once they are in the tables. The same sources make the same bytes, regardless of
order, number of processes and interruptions.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import polars as pl

from tracekit.base.command_line import command
from tracekit.base.errors import OutputError, StudyError
from tracekit.fleet.exclusions import EVERYWHERE
from tracekit.fleet.executor import Outcome
from tracekit.fleet.results import read_result, result_path, waiting
from tracekit.fleet.sources import MARK, Source
from tracekit.fleet.tables import BY_JOB, STUDY_VERSION, TABLES, frame

PARTS = "0123456789abcdef"
_ROW_GROUP = 1 << 17
_MARK_TEXT = json.dumps({"study_version": STUDY_VERSION, "made_by": "tracekit fleet run"}) + "\n"


class Study:
    """The study in the folder `path`. Methods raise StudyError if it is not one, OutputError if they cannot write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def results(self) -> Path:
        """The folder of results that are not yet in the tables."""
        return self.path / ".run" / "results"

    @property
    def _seen(self) -> Path:
        return self.path / ".run" / "seen.jsonl"

    def part(self, table: str, part: str = PARTS[0]) -> Path:
        """The file of a part of a table."""
        return self.path / table / f"part-{part}.parquet"

    # ---- reading

    @property
    def unfinished(self) -> bool:
        """True if a run left results that are not in the tables, or is under way."""
        return self.results.is_dir() and any(self.results.iterdir())

    def check(self) -> None:
        """Raise StudyError if there is no study that this tracekit can read."""
        try:
            text = (self.path / MARK).read_text(encoding="utf-8")
        except OSError:
            raise StudyError(
                f"{self.path}: not a study; create one with `{command('fleet', 'run', 'SOURCES', '--out', self.path)}`"
            ) from None
        try:
            version = json.loads(text).get("study_version")
        except (ValueError, AttributeError):
            version = None
        if version != STUDY_VERSION:
            raise StudyError(
                f"{self.path}: a study of version {version!r:.20}; this tracekit reads version {STUDY_VERSION}: upgrade"
                " tracekit"
            )

    def state(self) -> tuple[tuple[str, int, int], ...]:
        """Every table file with its size and time, which changes whenever a table does."""
        files = sorted(path for table in TABLES for path in (self.path / table).glob("part-*.parquet"))
        return tuple((str(path), found.st_size, found.st_mtime_ns) for path in files for found in [path.stat()])

    def table(self, name: str) -> pl.LazyFrame:
        """A table, lazily; without rows if nothing is there yet."""
        files = sorted((self.path / name).glob("part-*.parquet"))
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
        if result_path(self.results, digest, analysis).exists():
            return True
        mine = (pl.col("job") == digest) & (pl.col("analysis") == analysis)
        parts = (self.part("jobs", digest[0]), self.part("exclusions", PARTS[0]))
        return any(
            not pl.scan_parquet(part, glob=False).filter(mine).select("job").head(1).collect().is_empty()
            for part in parts
            if part.exists()
        )

    def analysed(self, analysis: str) -> set[str]:
        """The contents that have been analysed, in the tables or not."""
        wanted = pl.col("analysis") == analysis
        done = {digest for digest, _ in waiting(self.results, analysis)}
        for table in ("jobs", "exclusions"):
            done |= set(self.table(table).filter(wanted).select("job").drop_nulls().collect()["job"])
        return done

    def seen(self) -> dict[str, tuple[str, str]]:
        """Source -> its stamp and the digest of its content when it was last read."""
        found: dict[str, tuple[str, str]] = {}
        if self._seen.exists():
            for line in self._seen.read_text(encoding="utf-8").splitlines():
                try:
                    url, stamp, digest = json.loads(line)
                except ValueError:  # its writer was killed: the source is read again
                    continue
                found[url] = stamp, digest
        return found

    # ---- writing

    @contextmanager
    def running(self, analysis: str) -> Iterator[SeenLog]:
        """The one run of this study. Raises StudyError if there is another, or the folder is something else."""
        try:
            if self.path.exists() and not (self.path / MARK).exists() and any(self.path.iterdir()):
                raise StudyError(f"{self.path}: neither empty nor a study; choose another --out")
            self.results.mkdir(parents=True, exist_ok=True)
            with open(self.path / ".run" / "lock", "wb") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise StudyError(f"{self.path}: another run is writing this study; wait for it") from None
                if not (self.path / MARK).exists():
                    _put(self.path / MARK, _MARK_TEXT.encode())
                self.check()
                list(waiting(self.results, analysis))  # removes unfinished results and those of another analysis
                with open(self._seen, "ab") as log:
                    yield SeenLog(log)
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def fold(self, analysis: str, failed: Mapping[str, Outcome], tried: set[str]) -> None:
        """Put all results into the tables, then remove them. Raises OutputError.

        `failed`: outcomes without a lasting result, by source. `tried`: all sources of this run.
        """
        before = {row["source"]: row["job"] for row in self.read("sources").to_dicts()}
        now = before | {url: digest for url, (_, digest) in self.seen().items() if url not in failed}
        results = dict(waiting(self.results, analysis))
        wanted = set(now.values())
        dropped = set(before.values()) - wanted
        first = _first_source(now)
        left_out = [self._old_exclusions(wanted - results.keys(), set(failed) | tried)]
        for part in PARTS:
            mine = {digest: path for digest, path in results.items() if digest[0] == part}
            if mine or any(digest[0] == part for digest in dropped):
                left_out += self._fold_part(part, mine, wanted)
        left_out.append(_failures([one for url, one in failed.items() if url not in now]))
        exclusions = pl.concat(left_out).with_columns(
            source=pl.coalesce("source", pl.col("job").replace_strict(first, default=None, return_dtype=pl.String))
        )
        self._write("exclusions", exclusions.sort("job", "source", "rule", nulls_last=True))
        sources = frame("sources", {"source": sorted(now), "job": [now[url] for url in sorted(now)]})
        self._write("sources", sources)
        for path in results.values():
            path.unlink(missing_ok=True)
        self._forget(now)

    def _fold_part(self, part: str, results: Mapping[str, Path], wanted: set[str]) -> list[pl.DataFrame]:
        """Put results into one part of the tables, and drop the jobs that no source has; returns their exclusions."""
        read = {digest: rows for digest, path in results.items() if (rows := read_result(path)) is not None}
        keep = pl.col("job").is_in(list(wanted - read.keys()))
        for table, schema in BY_JOB.items():
            path = self.part(table, part)
            old = [pl.read_parquet(path, glob=False).filter(keep)] if path.exists() else []
            new = [rows[table] for digest, rows in read.items() if table in rows and digest in wanted]
            merged = pl.concat([pl.DataFrame(schema=schema), *old, *new])
            self._write(table, merged.sort("job", maintain_order=True), part)
        return [rows["exclusions"] for digest, rows in read.items() if digest in wanted]

    def _old_exclusions(self, kept: set[str], tried: set[str]) -> pl.DataFrame:
        """Exclusions of jobs that stay as they are, and of sources that failed earlier and were not tried now."""
        of_job = pl.col("job").is_in(list(kept))
        return self.read("exclusions").filter(
            of_job | (pl.col("job").is_null() & ~pl.col("source").is_in(list(tried)))
        )  # fmt: skip

    def _write(self, table: str, rows: pl.DataFrame, part: str = PARTS[0]) -> None:
        (self.path / table).mkdir(exist_ok=True)
        held = io.BytesIO()  # first, because polars reports a full disk as damage
        rows.rechunk().write_parquet(held, compression="zstd", row_group_size=_ROW_GROUP, statistics=True)
        _put(self.part(table, part), held.getvalue())

    def _forget(self, now: Mapping[str, str]) -> None:
        """Reduce the log of seen sources to one line per source."""
        lines = [_line(url, stamp, digest) for url, (stamp, digest) in sorted(self.seen().items()) if url in now]
        _put(self._seen, b"".join(lines))


class SeenLog:
    """The file to which a line is added as each source is done, so that a killed run need not read it again."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        if file.tell():
            file.write(b"\n")  # terminates a line whose writer was killed

    def add(self, source: Source, outcome: Outcome) -> None:
        """Note the content of a source. Raises OSError."""
        if outcome.digest is not None:
            self.file.write(_line(source.url, outcome.stamp, outcome.digest))
            self.file.flush()


def _line(url: str, stamp: str, digest: str) -> bytes:
    return json.dumps([url, stamp, digest]).encode() + b"\n"


def _first_source(now: Mapping[str, str]) -> dict[str, str]:
    """Content -> the first source with it, by name."""
    first: dict[str, str] = {}
    for url in sorted(now):
        first.setdefault(now[url], url)
    return first


def _failures(outcomes: list[Outcome]) -> pl.DataFrame:
    """The rows of sources without a content."""
    columns = {
        "source": [one.url for one in outcomes],
        "rule": [one.rule for one in outcomes],
        "scope": [EVERYWHERE] * len(outcomes),
        "reason": [one.reason for one in outcomes],
    }
    return frame("exclusions", columns)


def _put(path: Path, content: bytes) -> None:
    """Write a complete file in place of the existing one. Raises OutputError."""
    temporary = path.with_name(f".{path.name}.unfinished")  # the lock permits only one writer
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{path}: cannot be written: {error.strerror or error}; make room or correct permissions, and run again"
    )
