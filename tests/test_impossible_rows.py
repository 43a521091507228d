"""An impossible row of a catalogue is named and left out; every list shows the rest, repair reads its trace."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from unittest import mock

import duckdb
import pytest

from tests.dashboards.page_text import Pages
from tests.handmade import run, run_process, slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import StoreError
from tracekit.live.metrics import JobStates, StoreMetrics
from tracekit.store import Incoming, Store
from tracekit.store.care import damages
from tracekit.store.catalogue import MOST_NAMED
from tracekit.store.catalogue_rows import TABLES, impossible

#: Table, column and a value, as SQL, that a foreign or damaged catalogue can hold and tracekit never writes.
IMPOSSIBLE = [
    *(("windows", size, value) for size in ("dp", "pp", "tp", "cp", "ep", "vpp", "dsp") for value in ("-5", "0")),
    *(("windows", size, "2147483647") for size in ("dp", "pp", "world_size")),
    *(("windows", size, "NULL") for size in ("dp", "pp", "dsp")),
    ("windows", "job_id", "-5"),
    ("windows", "number", "-1"),
    ("windows", "kind", "'nonsense'"),
    ("windows", "added_at", "'infinity'"),
    ("windows", "added_at", "'290000-01-01'"),
    ("windows", "added_at", "'0044-03-15 (BC)'"),
    ("windows", "world_size", "-5"),
    ("windows", "world_size", "7"),
    ("windows", "steps", "-5"),
    ("windows", "last_step", "-5"),
    ("windows", "first_step", "2147483647"),
    *(("windows", time, value) for time in ("started_at", "ended_at") for value in ("'nan'", "'inf'", "-1e300")),
    ("windows", "ops", "9223372036854775807"),
    ("windows", "ops", "-5"),
    *(("windows", "metadata", f"'{text}'") for text in ("", "[", "[]", "7", "[" * 5000)),
    *(("windows", figure, "'nan'") for figure in ("slowdown", "waste", "recorded_s", "original_s", "ideal_s")),
    *(("windows", lost, "'inf'") for lost in ("lost_gpu_hours", "lost_gpu_hours_per_day")),
    ("windows", "slowdown", "-5"),
    ("windows", "waste", "5"),
    ("windows", "ideal_s", "-5"),
    ("windows", "cause_kinds", "['a', 'b', 'c', 'd', 'e', 'f', 'g']"),
    ("windows", "cause_places", "NULL"),
    ("windows", "cause_hosts", "[]"),
    *(("windows", figure, "NULL") for figure in ("straggling", "trustworthy", "waste", "lost_gpu_hours")),
    ("windows", "slowdown", "NULL"),
    ("findings", "share", "'nan'"),
    ("findings", "confidence", "5"),
    ("findings", "saved_gpu_hours_per_day", "'-inf'"),
    ("findings", "ranks_missing", "-5"),
    ("findings", "dropped_records", "-5"),
    ("findings", "number", "-5"),
    ("culprits", "cost_s", "'nan'"),
    ("culprits", "share", "'inf'"),
    ("culprits", "confidence", "-5"),
    ("files", "part", "'nonsense'"),
    ("files", "bytes", "-5"),
    ("files", "crc32", "-5"),
    *(("incidents", "cause", f"'{text}'") for text in ("", "[", "{}", "7", "[" * 5000, '{"kind": 7}')),
    ("incidents", "opened_at", "'infinity'"),
    ("incidents", "closed_at", "'290000-01-01'"),
    ("incidents", "clear", "-5"),
    ("watches", "began_at", "'-infinity'"),
    ("watches", "ended_at", "'infinity'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a good job and a bad one, each with an incident."""
    path = tmp_path_factory.mktemp("whole") / "jobs.store"
    for name in ("good", "bad"):
        trace = slow_trace((0, 1), name=name, step_starts={0: 1.7e9, 1: 1.7e9 + 1}, metadata={"hosts": {"0": "node-a"}})
        Store(path).begin_watch(name, "x")
        Store(path).append(Incoming(trace, name, "x", PipelineJob(trace).stored()))
    assert len(Store(path).incidents()) == 2
    return path


def damaged(whole: Path, folder: Path, table: str, column: str, value: str) -> Store:
    """A copy of the store in which the bad job has that value."""
    path = Path(shutil.copytree(whole, folder / "jobs.store"))
    with duckdb.connect(str(path / "catalog.duckdb")) as connection:
        which = "job_id = (SELECT job_id FROM jobs WHERE name = 'bad')"
        connection.execute(f"UPDATE {table} SET {column} = {value} WHERE {which}")  # noqa: S608
    return Store(path)


@pytest.fixture(scope="module")
def foreign(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a good job and one for each of IMPOSSIBLE, called `bad N`, like the bad one but for that value."""
    path = Path(shutil.copytree(whole, tmp_path_factory.mktemp("foreign") / "jobs.store"))
    with duckdb.connect(str(path / "catalog.duckdb")) as connection:
        connection.begin()
        for number, (table, column, value) in enumerate(IMPOSSIBLE):
            job = 100 + number
            connection.execute(f"INSERT INTO jobs VALUES ({job}, 'bad {number}', 'x')")  # noqa: S608
            for each in ("windows", "findings", "culprits", "files", "incidents", "watches"):
                but = f"{job} AS job_id" + (f", {job} AS incident_id" if each == "incidents" else "")
                connection.execute(f"INSERT INTO {each} SELECT * REPLACE ({but}) FROM {each} WHERE job_id = 2 LIMIT 1")  # noqa: S608
            connection.execute(f"UPDATE {table} SET {column} = {value} WHERE job_id = {job}")  # noqa: S608
        connection.commit()
    return path


def test_each_impossible_row_is_named_and_left_out_of_every_list(foreign: Path) -> None:
    store = Store(foreign)
    with store.reading() as catalogue:
        lines = "\n".join(catalogue.left_out)
    for number, (table, column, value) in enumerate(IMPOSSIBLE):
        job = "no job" if column == "job_id" else f"bad {number}"
        assert re.search(rf"^{job}(, window -?\d+)?: {table}\.\w+ is ", lines, re.MULTILINE), (table, column, value)
    listed = run_process("store", "list", "--store", foreign)
    assert listed.code == 0
    assert re.search(r"^ *good ", listed.out, re.MULTILINE)
    assert all(line in listed.err for line in catalogue.left_out[:MOST_NAMED])
    assert f"left out {len(catalogue.left_out) - MOST_NAMED} more impossible rows" in listed.err
    windows = {f"bad {number}" for number, (table, *_) in enumerate(IMPOSSIBLE) if table == "windows"}
    others = {f"bad {number}" for number in range(len(IMPOSSIBLE))} - windows
    assert {job.name for job in store.jobs()} == {"good", "bad", *others}
    assert {job for job, *_ in JobStates.of(store).jobs.rows()} == {"good", "bad", *others}
    assert re.search(
        r"^ +Since +step 0, 2023-11-14", run("store", "incidents", "good", "--store", foreign).out, re.MULTILINE
    )
    assert " 0 to 1 " in run("store", "windows", "good", "--store", foreign).out
    assert list(StoreMetrics(lambda: JobStates.of(store)).collect())
    assert set(catalogue.left_out) <= set(damages(store))


def test_pages_show_the_rest_and_name_what_is_left_out(foreign: Path) -> None:
    pages = Pages(foreign)
    for page, shown in (("/", "good"), ("/incidents", "good"), ("/hosts", "was ever the culprit")):
        text = pages.text(page)
        assert shown in text
        assert "Left out" in text
        assert "windows.dp is -5" in text
        assert "Something broke" not in text
    assert "good" in {row["name"] for row in pages.job_rows()}
    assert "rank" in pages.text("/job", job="good")
    assert re.search(r"^good,", pages.client().get("/download/jobs.csv").text, re.MULTILINE)
    assert pages.client().get("/metrics").status_code == 200


def test_a_catalogue_is_looked_at_again_once_it_has_changed_and_not_before(whole: Path, tmp_path: Path) -> None:
    store = Store(Path(shutil.copytree(whole, tmp_path / "jobs.store")))
    with mock.patch("tracekit.store.catalogue_rows.impossible", side_effect=impossible) as looked:
        for changed in (False, False, True, True):
            if changed and looked.call_count == len(TABLES):
                with duckdb.connect(str(store.path / "catalog.duckdb")) as connection:
                    connection.execute("UPDATE windows SET dp = 0 WHERE job_id = 2")
            assert {job.name for job in store.jobs()} == ({"good"} if changed else {"good", "bad"})
            assert looked.call_count == len(TABLES) * (1 + changed)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [("windows", "dp", "-5"), ("windows", "job_id", "-5"), ("files", "part", "'x'"), ("incidents", "cause", "'['")],
)
def test_repair_drops_impossible_rows_and_takes_windows_from_their_traces(
    table: str, column: str, value: str, whole: Path, tmp_path: Path
) -> None:
    store = damaged(whole, tmp_path, table, column, value)
    before = {path for path in store.path.glob("jobs/*/*.parquet") if "workers" not in path.name}
    assert run("store", "repair", "--store", store.path).code == 0
    assert run("store", "check", "--store", store.path).code == 0
    if table == "windows":
        assert {job.name for job in store.jobs()} == {"good", "bad"}
        assert store.load("bad").ops.equals(slow_trace((0, 1)).ops)
        assert before <= set(store.path.glob("jobs/*/*"))


def test_a_job_with_an_impossible_row_can_still_be_appended_to_or_says_why(whole: Path, tmp_path: Path) -> None:
    store = damaged(whole, tmp_path, "windows", "kind", "'nonsense'")
    trace = slow_trace((2, 3))
    ran = run("store", "list", "--store", store.path)
    assert ran.code == 0
    with pytest.raises(StoreError, match="run `tracekit store repair --store"):
        store.append(Incoming(trace, "bad", "x"))
    assert store.append(Incoming(trace, "good", "x")) == 1
