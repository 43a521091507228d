"""The store: what goes in comes out, several jobs side by side, and clear words where the file cannot be used."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from msgspec.structs import replace

from tests.handmade import LAYOUT, findings_of, healthy_frame, run, slow_frame, slow_trace
from tests.reports import hang_with
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.contained import Contained
from tracekit.base.errors import StoreError
from tracekit.report.findings import Findings, Unanalysed
from tracekit.sources.load import load_from_store
from tracekit.store import Incoming, Store, catalogue_file, default_store
from tracekit.store.folder import Folder
from tracekit.store.store import Writer
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout
from tracekit.trace.schema import SCHEMA

CATALOGUE = "catalog.duckdb"
SAMPLE = Path(__file__).parents[1] / "sample_traces" / "slow_worker.parquet"
KEYS = ["step", "dp_rank", "pp_rank", "kind", "seq"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "jobs.store")


def files(store: Store) -> list[str]:
    """The files of jobs in the folder."""
    return sorted(str(path.relative_to(store.path)) for path in store.path.glob("jobs/*/*"))


def incoming(trace: Trace, name: str | None = None) -> Incoming:
    return Incoming(trace, name or trace.name, "slow.parquet")


def test_a_trace_comes_back_as_it_went_in(store: Store) -> None:
    metadata = {"hosts": {"0": "node-a"}, "nested": [1, {"ü": None}], "framework": "'); DROP TABLE op; --"}
    layout = Layout(dp=2, pp=2, tp=4, cp=1, ep=2, vpp=1, dsp=1, world_size=16)
    trace = Trace.from_frame(
        slow_frame((3, 8)), layout, name="a job", step_starts={3: 1.5e9, 8: 1.5e9 + 15.5}, metadata=metadata
    )
    store.add([incoming(trace)])
    loaded = store.load("a job")
    assert loaded.ops.sort(KEYS).equals(trace.ops.sort(KEYS))
    assert loaded.ops.schema == pl.Schema(SCHEMA)
    assert (loaded.layout, loaded.name) == (layout, "a job")
    assert loaded.metadata == metadata
    assert loaded.step_starts == {3: 1.5e9, 8: 1.5e9 + 15.5}


def test_unknown_step_starts_stay_unknown(store: Store) -> None:
    store.add([incoming(Trace.from_frame(slow_frame((3, 8)), LAYOUT, name="job", step_starts={8: 2.0}))])
    assert store.load("job").step_starts == {8: 2.0}


def test_the_list_of_jobs_says_what_each_is_without_reading_its_ops(store: Store) -> None:
    store.add([incoming(slow_trace((0, 1)), "first")])
    store.add([incoming(slow_trace((0,)), "second")])
    second, first = store.jobs()
    assert (second.name, second.steps, second.ops) == ("second", 1, 48)
    assert (first.name, first.steps, first.ops, first.layout, first.source) == ("first", 2, 96, LAYOUT, "slow.parquet")
    assert first.imported_at <= second.imported_at
    assert first.imported_at.utcoffset() is not None


def test_jobs_come_by_what_the_answer_saves_a_day_and_those_not_to_be_trusted_last(store: Store) -> None:
    """The first fix of the cheap job saves 99 GPU-hours a day, whatever the price of its leading cause; of one step, no
    day follows.
    """

    def stored(name: str, saved_a_day: float, *, trusted: bool = True) -> Incoming:
        trace = slow_trace((0, 1))
        report = PipelineJob(trace).whatif()
        place = report.verdict.first_fix
        assert place is not None
        report.fixes[place] = replace(report.fixes[place], saved_gpu_hours_per_day=saved_a_day)
        return Incoming(trace, name, "x", Findings(replace(report, trust=replace(report.trust, trustworthy=trusted))))

    once = Incoming(slow_trace((0,)), "once", "x", PipelineJob(slow_trace((0,))).stored())
    store.add([stored("doubtful", 200.0, trusted=False), once, stored("cheap", 99.0), stored("dear", 100.0)])
    lines = run("store", "list", "--store", store.path).out.splitlines()
    shown = [line.split()[:2] for line in lines if line.endswith("UTC") or line[:1] == " "][1:]
    assert shown == [["dear", "100"], ["cheap", "99"], ["once", "-"], ["doubtful", "?"]]


def test_the_newest_is_the_job_imported_last_even_by_one_import(store: Store) -> None:
    store.add([incoming(slow_trace((0,)), "first"), incoming(slow_trace((0,)), "second")])
    assert store.newest() == "second"
    assert load_from_store(store=store.path).trace.name == "second"
    store.add([incoming(slow_trace((0,)), "first")], replace=True)
    assert store.newest() == "first"


@pytest.mark.parametrize(
    "name", ["'", '"; DROP TABLE job; --', "$name", "ü\n\x1b[31m", "", " ", "x" * 300, "half\udcff"]
)
def test_any_text_is_a_job_name(name: str, store: Store) -> None:
    """Values are bound, so no name can be taken for SQL."""
    store.add(
        [
            incoming(slow_trace((0,), name="other")),
            Incoming(slow_trace((0,), name=name), slow_trace(name=name).name, "'"),
        ]
    )
    stored = slow_trace(name=name).name
    assert store.load(stored).name == stored
    assert {job.name for job in store.jobs()} == {"other", stored}


def test_a_name_too_long_for_an_address_is_an_error(store: Store) -> None:
    with pytest.raises(StoreError, match="has 301 characters, more than 300; choose another --name"):
        store.add([incoming(slow_trace((0,)), "job"), incoming(slow_trace((0,)), "x" * 301)])
    with pytest.raises(StoreError, match="has 301 characters"):
        store.check_new("x" * 301)
    assert not store.path.exists()


def test_a_name_that_is_taken_is_an_error_unless_replaced(store: Store) -> None:
    store.add([incoming(slow_trace((0, 1)), "job"), incoming(slow_trace((0,)), "other")])
    with pytest.raises(
        StoreError, match="already has a job 'job'; replace it with --replace, or choose another --name"
    ):
        store.add([incoming(slow_trace((0,)), "job")])
    assert len(store.load("job").steps) == 2
    store.add([Incoming(Trace.from_frame(healthy_frame((7,)), LAYOUT, name="x"), "job", "y")], replace=True)
    assert store.load("job").steps.tolist() == [7]
    assert store.load("job").ops.height == 48
    assert store.load("other").ops.height == 48


def test_a_new_job_gets_a_name_that_no_job_has(store: Store) -> None:
    """One that is watched has its name before it has a window; one that only hung leaves it."""
    longest = "x" * 300
    assert store.free_name("job") == "job"
    store.add([incoming(slow_trace((0,)), name) for name in ("job", "job-2", longest)])
    store.begin_watch("watched", "torchrun")
    store.add_hang("hung", ["HANG"], hang_with())
    names = [store.free_name(name) for name in ("job", "watched", "hung", longest)]
    assert names == ["job-3", "watched-2", "hung", f"{'x' * 298}-2"]
    with pytest.raises(StoreError, match="already has a job 'job'; choose another --name"):
        store.check_new("job")
    with pytest.raises(StoreError, match=r"DuckDB needs names in UTF-8, not 'half"):
        store.check_new("half\udcff")


def test_a_step_at_a_time_that_no_calendar_has_is_stored(store: Store) -> None:
    """1e11 s before 1970 there was no year; the clock of the store says when the incident began."""
    trace = slow_trace((0, 1), step_starts={0: -1e11, 1: -1e11 + 15.5})
    store.append(Incoming(trace, "job", "x", findings_of(trace)))
    assert store.load("job").step_starts[0] == -1e11
    (incident,) = store.incidents("job")
    assert incident.opened_at.year > 2000


def test_two_traces_of_one_name_are_an_error_even_with_replace(store: Store) -> None:
    """The second would silently take the place of the first."""
    with pytest.raises(StoreError, match="two of the traces have the job name 'job'"):
        store.add([incoming(slow_trace((0,)), "job"), incoming(slow_trace((1,)), "job")], replace=True)
    assert not store.path.exists()


class CountedName(str):
    """A name that counts how often names are compared."""

    compared = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)


def test_looking_for_a_name_that_comes_twice_is_linear(store: Store) -> None:
    trace, count = slow_trace((0,)), 1000
    names = [CountedName(f"job {number}") for number in [*range(count), 0]]
    with pytest.raises(StoreError, match="two of the traces have the job name 'job 0'"):
        store.add([incoming(trace, name) for name in names])
    assert CountedName.compared < 10 * count


def test_a_failed_import_leaves_the_store_as_it_was(store: Store) -> None:
    store.add([incoming(slow_trace((0,)), "old")])
    with pytest.raises(StoreError, match="already has a job 'old'"):
        store.add([incoming(slow_trace((0,)), "new"), incoming(slow_trace((0,)), "old")])
    assert [job.name for job in store.jobs()] == ["old"]
    assert files(store) == ["jobs/1/0.parquet"]


def test_an_interrupted_import_leaves_the_store_as_it_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the first of two traces is in."""
    store.add([incoming(slow_trace((0,)), "old")])
    write = Folder.write_window

    def interrupted(self: Folder, job_id: int, number: int, item: Incoming) -> Any:
        if item.name == "second":
            raise KeyboardInterrupt
        return write(self, job_id, number, item)

    monkeypatch.setattr(Folder, "write_window", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.add([incoming(slow_trace((0,)), "first"), incoming(slow_trace((0,)), "second")])
    assert [job.name for job in store.jobs()] == ["old"]
    assert store.load("old").ops.height == 48
    assert files(store) == ["jobs/1/0.parquet"]


def test_a_failed_first_import_leaves_no_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an error of DuckDB nor an interrupt leaves a file behind."""
    for failure in (duckdb.IOException("disk full"), KeyboardInterrupt()):

        def fail(*_: object, failure: BaseException = failure) -> None:
            raise failure

        monkeypatch.setattr(Writer, "write", fail)
        with pytest.raises(StoreError if isinstance(failure, duckdb.Error) else KeyboardInterrupt):
            store.add([incoming(slow_trace((0,)))])
        assert list(store.path.parent.iterdir()) == []


def test_an_unknown_job_is_answered_with_the_nearest_name(store: Store) -> None:
    store.add([incoming(slow_trace((0,)), "llama-70b")])
    with pytest.raises(StoreError, match="no job 'llama-7b'; did you mean 'llama-70b'"):
        store.load("llama-7b")
    with pytest.raises(StoreError, match="no job 'zzz'; the store holds llama-70b"):
        store.load("zzz")


def test_a_store_that_is_not_there_is_not_made_by_reading(store: Store) -> None:
    with pytest.raises(StoreError, match="no such store; make one with `tracekit import TRACE --store"):
        store.jobs()
    assert not store.path.exists()


def test_a_folder_that_is_no_store_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a folder, but not a tracekit store; choose another --store"):
        Store(tmp_path).jobs()


def test_a_store_without_jobs_says_how_to_add_one(store: Store) -> None:
    store.add([])
    assert store.jobs() == ()
    with pytest.raises(StoreError, match="the store holds no job; add one with `tracekit import TRACE --store"):
        store.newest()


def test_a_store_in_use_by_a_writer_says_so(store: Store) -> None:
    """A second process holds the file for writing until its stdin closes."""
    store.add([incoming(slow_trace((0,)))])
    holder = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(store.path / CATALOGUE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        for use in (store.jobs, lambda: store.load("slow job"), lambda: store.add([incoming(slow_trace((0,)), "b")])):
            with pytest.raises(StoreError, match=r"another process has the store open .* try again when it is done"):
                use()
        ran = run("whatif", "--store", store.path)
        assert ran.code == 2
        assert f"{store.path}: another process has the store open" in ran.message
    assert [job.name for job in store.jobs()] == ["slow job"]


def test_a_reader_keeps_its_view_while_a_writer_replaces_the_store(store: Store) -> None:
    store.add([incoming(slow_trace((0,)), "a")])
    with duckdb.connect(str(store.path / CATALOGUE), read_only=True) as reader:
        store.add([incoming(slow_trace((0,)), "b")])
        assert reader.execute("SELECT name FROM jobs").fetchall() == [("a",)]
    assert [job.name for job in store.jobs()] == ["b", "a"]


def test_duckdb_is_started_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting it takes ten times as long as attaching a catalogue."""
    started, connect = [], duckdb.connect
    monkeypatch.setattr(duckdb, "connect", lambda *path, **options: started.append(path) or connect(*path, **options))
    monkeypatch.setattr(catalogue_file, "_STARTED", {})
    store.add([incoming(slow_trace((0,)))])
    assert [job.name for job in store.jobs()] == ["slow job"]
    assert store.load("slow job").ops.height == 48
    assert len(started) == 1


def test_a_store_can_be_read_while_it_is_being_read(store: Store) -> None:
    store.add([incoming(slow_trace((0,)))])
    with store.reading() as catalogue:
        assert store.load("slow job").ops.height == 48
        outside = "import duckdb, sys; duckdb.connect(sys.argv[1])"
        ran = subprocess.run(
            [sys.executable, "-c", outside, str(store.path / CATALOGUE)], capture_output=True, text=True
        )
        assert "Could not set lock" in ran.stderr  # nobody writes what is being read
        store.add([incoming(slow_trace((0,)), "b")])
        assert [job.name for job in catalogue.jobs()] == ["slow job"]
    assert [job.name for job in store.jobs()] == ["b", "slow job"]


@pytest.mark.slow
def test_a_fork_of_a_process_that_has_used_the_store_ends_well(store: Store) -> None:
    """It frees what it has, and threads of DuckDB would be gone by then."""
    store.add([incoming(slow_trace((0,)))])
    fork = (
        "import os, sys; from pathlib import Path; from tracekit.store import Store; Store(Path(sys.argv[1])).jobs();"
        "child = os.fork(); sys.exit(child and os.waitpid(child, 0)[1])"
    )
    ran = subprocess.run([sys.executable, "-c", fork, str(store.path)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_nothing_in_a_catalogue_runs_as_part_of_our_queries(store: Store, tmp_path: Path) -> None:
    """A macro in place of a function of DuckDB does nothing, a view in place of a table is an error."""
    store.add([incoming(slow_trace((0,)))])
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    content = "SELECT content FROM read_text('here')".replace("here", str(secret))
    with duckdb.connect(str(store.path / CATALOGUE)) as other:
        other.execute(f"CREATE MACRO max(x) AS ({content})")
        other.execute(f"CREATE MACRO current_database() AS ({content})")
        other.execute("CREATE MACRO duckdb_views() AS TABLE SELECT 'none' AS view_name WHERE false")
        other.execute("CREATE VIEW mine AS SELECT name FROM jobs")
        other.execute("CREATE SCHEMA elsewhere; CREATE VIEW elsewhere.jobs AS SELECT 1")
    assert [job.name for job in store.jobs()] == ["slow job"]
    assert "of this machine" not in str(store.job_list().to_dicts())
    with duckdb.connect(str(store.path / CATALOGUE)) as other:
        other.execute("ALTER TABLE store_version RENAME TO renamed")
        other.execute(f"CREATE VIEW Store_Version (version) AS {content}")
    with pytest.raises(StoreError, match="not a store of tracekit: store_version is a view there, not a table"):
        store.jobs()
    with pytest.raises(StoreError, match="not a store of tracekit"):
        store.add([incoming(slow_trace((0,)), "b")])


def test_a_damaged_catalogue_leaves_others_readable(store: Store, tmp_path: Path) -> None:
    store.add([incoming(slow_trace((0,)))])
    damaged = Store(tmp_path / "damaged.store")
    damaged.add([incoming(slow_trace((0,)))])
    content = bytearray((damaged.path / CATALOGUE).read_bytes())
    content[20_000:-20_000] = bytes(len(content) - 40_000)
    (damaged.path / CATALOGUE).write_bytes(content)
    with pytest.raises(StoreError, match="DuckDB cannot use the store"):
        damaged.jobs()
    assert [job.name for job in store.jobs()] == ["slow job"]


def test_of_a_catalogue_that_was_cut_every_command_names_the_file(store: Store) -> None:
    store.add([incoming(slow_trace((0,)))])
    os.truncate(store.path / CATALOGUE, 1_300_000)
    for words in (["store", "check"], ["store", "repair"], ["store", "prune", "--older-than", "1d"], ["dashboard"]):
        ran = run(*words, store.path)
        assert ran.code == 2
        assert f"delete {store.path / CATALOGUE}, then `tracekit store repair --store {store.path}`" in ran.err
        assert ".tracekit.store-" not in ran.err


def test_the_mark_of_an_older_version_is_no_damage(store: Store) -> None:
    store.add([incoming(slow_trace((0,)), "job")])
    older = "This folder is a store of tracekit; `tracekit info --store FOLDER` lists its jobs.\n"
    (store.path / "tracekit-store").write_text(older)
    checked = run("store", "check", store.path)
    assert (checked.code, checked.out) == (0, f"{store.path}: all files are whole\n")


def test_a_mark_that_was_cut_is_named_and_renewed(store: Store) -> None:
    store.add([incoming(slow_trace((0,)), "job")])
    mark = store.path / "tracekit-store"
    content = mark.read_bytes()
    for writer in (("store", "repair", store.path), ("import", SAMPLE, "--store", store.path)):
        os.truncate(mark, len(content) // 2)
        checked = run("store", "check", store.path)
        assert checked.code == 3
        assert checked.out.splitlines()[0].startswith(f"{mark}: is not as it was written; the next writer")
        assert run(*writer).code == 0
        assert mark.read_bytes() == content
        assert run("store", "check", store.path).code == 0


@pytest.mark.slow
def test_writers_take_turns_and_lose_nothing(store: Store) -> None:
    writer = (
        "import sys; from pathlib import Path; from tracekit.store import Incoming, Store;"
        "from tests.handmade import slow_trace;"
        "[Store(Path(sys.argv[1])).add([Incoming(slow_trace((0,)), f'{sys.argv[2]}{i}', 'x')]) for i in range(3)]"
    )
    writers = [subprocess.Popen([sys.executable, "-c", writer, str(store.path), name]) for name in "ab"]
    assert [process.wait() for process in writers] == [0, 0]
    assert {job.name for job in store.jobs()} == {f"{name}{i}" for name in "ab" for i in range(3)}


def test_a_store_that_another_writer_marks_while_one_looks_is_a_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look finds no mark, the second the files of the other writer."""
    store.add([incoming(slow_trace((0,)))])
    looks = iter((False, True))
    monkeypatch.setattr("tracekit.store.folder.is_store_folder", lambda _: next(looks, True))
    store.add([incoming(slow_trace((0,)), "b")])
    assert {job.name for job in store.jobs()} == {"b", incoming(slow_trace((0,))).name}


def test_a_writer_that_waits_too_long_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([incoming(slow_trace((0,)))])
    monkeypatch.setattr("tracekit.store.catalogue_file.LOCK_TIMEOUT_S", 0.0)
    with (store.path / f".{CATALOGUE}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another process has been writing the store"):
            store.add([incoming(slow_trace((0,)), "b")])


def test_a_writer_that_waits_says_so_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add([incoming(slow_trace((0,)))])
    monkeypatch.setattr("tracekit.store.catalogue_file.WAIT_SHOWN_AFTER_S", 0.0)
    with (store.path / f".{CATALOGUE}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        polls = iter([None, None])

        def poll(_: float) -> None:
            if next(polls, lock) is lock:
                fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr("tracekit.store.catalogue_file.time.sleep", poll)
        store.add([incoming(slow_trace((0,)), "b")])
    assert capsys.readouterr().err == f"tracekit: {store.path}: waiting for another writer, at most 60 s\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a tracekit store"),
        (b"PAR1" * 100, "not a tracekit store"),
        (b"\0" * 8 + b"DUCK" + b"\0" * 8000, "a file of DuckDB, and a store is a folder"),
    ],
    ids=["empty", "Parquet", "DuckDB"],
)
def test_a_file_that_is_no_store_is_said_and_left_alone(content: bytes, reason: str, store: Store) -> None:
    store.path.write_bytes(content)
    for use in (store.jobs, lambda: store.add([incoming(slow_trace((0,)))])):
        with pytest.raises(StoreError, match=reason):
            use()
    assert store.path.read_bytes() == content


def test_a_store_cut_short_is_said(store: Store) -> None:
    """The catalogue, or a file that it names."""
    store.add([incoming(slow_trace(range(200)))])
    ops = store.path / "jobs" / "1" / "0.parquet"
    content = ops.read_bytes()
    ops.write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match=rf"0\.parquet: has {len(content) // 2:,} bytes; expected {len(content):,}"):
        store.load("slow job")
    catalogue = store.path / CATALOGUE
    catalogue.write_bytes(catalogue.read_bytes()[:5000])
    with pytest.raises(StoreError, match=r"jobs\.store: DuckDB cannot use the store") as found:
        store.load("slow job")
    ops.write_bytes(content)
    assert str(found.value).endswith(
        f"if it is damaged, delete {catalogue}, then `tracekit store repair --store {store.path}` rebuilds it from the"
        " traces, without incidents"
    )
    catalogue.unlink()
    assert run("store", "repair", "--store", store.path).code == 0
    assert store.load("slow job").ops.height == slow_trace(range(200)).ops.height


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DROP TABLE store_version", "a DuckDB file, but not a tracekit store; choose another --store"),
        (
            "UPDATE store_version SET version = 9",
            "store version 9; this tracekit uses 7: a newer tracekit wrote it, upgrade",
        ),
        ("DELETE FROM store_version", "store version none; this tracekit uses 7: import its traces again"),
        ("DROP TABLE windows", "DuckDB cannot use the store"),
    ],
)
def test_a_store_of_another_make_is_said(statement: str, reason: str, store: Store) -> None:
    store.add([incoming(slow_trace((0,)))])
    with duckdb.connect(str(store.path / CATALOGUE)) as connection:
        connection.execute(statement)
    before = (store.path / CATALOGUE).read_bytes()
    for use in (store.jobs, lambda: store.add([incoming(slow_trace((0,)), "b")])):
        with pytest.raises(StoreError, match=reason):
            use()
    assert (store.path / CATALOGUE).read_bytes() == before


@pytest.mark.parametrize("name", [":memory:", "md:jobs", "file.txt", "with space.duckdb", "quote'.duckdb"])
def test_any_file_name_is_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB would keep ":memory:" in memory, losing the import, and load an extension for "md:"."""
    monkeypatch.chdir(tmp_path)
    Store(Path(name)).add([incoming(slow_trace((0,)))])
    assert {path.name for path in tmp_path.iterdir()} == {name}
    assert Store(Path(name)).newest() == "slow job"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (Path("/nowhere/jobs.duckdb"), "cannot be written: No such file or directory; choose another place"),
        (Path("/proc"), "/proc: is a folder, but not a tracekit store; choose another place"),
        (Path("x" * 300), "File name too long"),
        (Path("half\udcff.duckdb"), "DuckDB needs a path in UTF-8; choose another --store"),
    ],
    ids=["no directory", "directory", "long name", "not UTF-8"],
)
def test_a_path_that_cannot_be_a_store_is_said(path: Path, reason: str) -> None:
    with pytest.raises(StoreError, match=reason):
        Store(path).add([incoming(slow_trace((0,)))])


def test_the_default_store_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEKIT_STORE", "/data/jobs.duckdb")
    assert default_store() == Path("/data/jobs.duckdb")
    monkeypatch.setenv("TRACEKIT_STORE", "")
    assert default_store() == Path("tracekit.store")


@pytest.mark.parametrize("version", [2, 3, 5])
def test_a_store_of_an_older_version_says_what_to_do_and_is_not_touched(version: int, store: Store) -> None:
    """Version 2 was a file, later ones are folders."""
    store.append(incoming(slow_trace((0,))))
    with duckdb.connect(str(store.path / CATALOGUE)) as connection:
        connection.execute("UPDATE store_version SET version = $version", {"version": version})
    if version == 2:
        (store.path / CATALOGUE).rename(store.path.with_suffix(".duckdb"))
        shutil.rmtree(store.path)
        store.path.with_suffix(".duckdb").rename(store.path)
    slow_trace((0,)).write_parquet(store.path.parent / "slow.parquet")
    before = {path: path.read_bytes() for path in store.path.parent.rglob("*") if path.is_file()}
    for command in (["store", "list"], ["whatif"], ["import", "slow.parquet"], ["store", "check"], ["store", "repair"]):
        ran = run(*command, "--store", store.path, cwd=store.path.parent)
        assert ran.code == 2
        assert ran.message.endswith("import its traces again with `tracekit import TRACE --store NEW`"), command
    assert {path: path.read_bytes() for path in store.path.parent.rglob("*") if path.is_file()} == before


def test_metadata_with_half_a_character_is_kept(store: Store) -> None:
    """A path that is not UTF-8 can get into the metadata, and so can a number that JSON does not know."""
    metadata = {"from": "a\udcffb", "loss": float("inf"), "gpus": {"0": {"uuid": "GPU\udcff"}}}
    store.add([incoming(Trace.from_frame(slow_frame(), LAYOUT, name="job", metadata=metadata))])
    assert store.load("job").metadata == metadata


def test_findings_are_stored_with_the_job_and_go_with_it(store: Store) -> None:
    """The report comes back as it was; a job stored without one has none, and replacing a job replaces it."""
    trace = slow_trace((3, 8))
    found = PipelineJob(trace).stored()
    assert isinstance(found, Findings)
    store.add([Incoming(trace, "one", "file", found), Incoming(trace, "two", "file")])
    assert store.report("one") == found.report
    assert store.report("two") is None
    assert files(store) == ["jobs/1/0.parquet", "jobs/1/0.report.json", "jobs/1/0.workers.parquet", "jobs/2/0.parquet"]
    store.add([Incoming(trace, "one", "file", Unanalysed("no graph"))], replace=True)
    assert store.report("one") is None
    assert store.job_list().filter(name="one").select("problem", "slowdown").rows() == [("no graph", None)]
    assert files(store) == ["jobs/2/0.parquet", "jobs/3/0.parquet"]


def test_what_lists_of_jobs_show_stands_in_columns(store: Store) -> None:
    job = PipelineJob(slow_trace((3, 8)))
    found = job.stored()
    store.add([Incoming(job.trace, "one", "file", found)])
    report = job.whatif()
    figures = (
        store.job_list()
        .select("slowdown", "waste", "trustworthy", "recorded_s", "lost_gpu_hours_per_day", "cause_kinds")
        .rows()
    )
    workers = store.workers("one")
    assert workers is not None
    steps = workers.select("step", "dp_ranks", "slowdown").rows()
    assert figures == [
        (
            report.slowdown,
            report.waste,
            report.trust.trustworthy,
            report.step_time_s.recorded,
            report.verdict.lost_gpu_hours_per_day,
            [finding.kind for finding in report.findings],
        )
    ]
    assert [row[:2] for row in steps] == [(3, [0, 1]), (8, [0, 1])]
    lanes = job.analysis.lanes
    assert lanes is not None
    for number, (_, _, slowdowns) in enumerate(steps):
        wanted = lanes.frames()["by_worker_per_step"].filter(pl.col("step") == (3, 8)[number])["slowdown"]
        assert slowdowns == pytest.approx(wanted.to_list(), rel=1e-6)


def test_a_private_store_stays_private(store: Store) -> None:
    store.add([incoming(slow_trace((0,)), "a")])
    store.path.chmod(0o700)
    (store.path / CATALOGUE).chmod(0o600)
    store.add([incoming(slow_trace((0,)), "b")])
    assert store.path.stat().st_mode & 0o777 == 0o700
    assert (store.path / CATALOGUE).stat().st_mode & 0o777 == 0o600


def test_changes_that_another_program_left_unfinished_are_not_lost(store: Store) -> None:
    """DuckDB keeps them beside the file; a copy of the file alone would lack them."""
    store.add([incoming(slow_trace((0,)), "a")])
    before = (store.path / CATALOGUE).read_bytes()
    log = store.path / f"{CATALOGUE}.wal"
    log.write_bytes(b"changes")
    with pytest.raises(StoreError, match=r"catalog.duckdb.wal: holds changes to the store"):
        store.add([incoming(slow_trace((0,)), "b")], replace=True)
    assert ((store.path / CATALOGUE).read_bytes(), log.read_bytes()) == (before, b"changes")


def test_a_store_that_another_program_changes_meanwhile_is_not_replaced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not know the lock."""
    store.add([incoming(slow_trace((0,)), "a")])
    write = Writer.write

    def changed(self: Writer, windows: Sequence[tuple[int, int, Incoming]]) -> None:
        write(self, windows)
        with duckdb.connect(str(store.path / CATALOGUE)) as other:
            other.execute("UPDATE jobs SET source = 'elsewhere'")

    monkeypatch.setattr(Writer, "write", changed)
    with pytest.raises(StoreError, match="another program has changed the store meanwhile; try again"):
        store.add([incoming(slow_trace((0,)), "b")])
    assert [(job.name, job.source) for job in store.jobs()] == [("a", "elsewhere")]


def test_a_lock_that_is_a_link_is_not_followed(store: Store) -> None:
    store.add([incoming(slow_trace((0,)))])
    lock = store.path / f".{CATALOGUE}.lock"
    lock.unlink()
    lock.symlink_to("elsewhere")
    with pytest.raises(StoreError, match=r"\.catalog\.duckdb\.lock: is a link to elsewhere, which is not followed"):
        store.add([incoming(slow_trace((0,)), "b")])
    assert not (store.path / "elsewhere").exists()


def test_of_two_first_writers_both_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one makes the store while this one is about to."""
    path, make_folder, others = tmp_path / "jobs.store", Contained.make_folder, iter(["other"])

    def late(self: Contained, folder: str, *, durable: bool = False) -> bool:
        for name in others:
            Store(path).add([Incoming(slow_trace(name=name), name, "by hand")])
        return make_folder(self, folder, durable=durable)

    monkeypatch.setattr(Contained, "make_folder", late)
    Store(path).add([Incoming(slow_trace(name="this"), "this", "by hand")])
    assert {job.name for job in Store(path).jobs()} == {"this", "other"}
    assert {file.name for file in tmp_path.iterdir()} == {"jobs.store"}


def test_a_first_writer_that_was_killed_leaves_an_empty_folder_that_the_next_one_takes(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.path.mkdir()
    store.check_new("job")
    assert store.free_name("job") == "job"
    store.add([incoming(slow_trace((0,)), "job")])
    assert [job.name for job in store.jobs()] == ["job"]
