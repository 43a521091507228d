"""`tracekit store sql`: a store answers one SELECT, and the query reaches nothing else."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import polars as pl
import pytest

from tests.collectors.conftest import POLL_S
from tests.handmade import run
from tracekit import load
from tracekit.base.errors import SelectionError
from tracekit.store import Incoming, Store
from tracekit.store.query import rows_of

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "sample_traces"
QUESTIONS = re.findall(r"```sql\n(.*?)\n```", (ROOT / "docs" / "store.md").read_text())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two jobs: `slow-worker` with two windows, of which the first has no analysis; `healthy` with one."""
    made = Store(tmp_path_factory.mktemp("it's a place") / "jobs.store")
    slow, healthy = (load(str(SAMPLES / f"{name}.parquet")) for name in ("slow_worker", "healthy"))
    made.append(Incoming(slow.trace, "slow-worker", "a sample"))
    for job in (slow, healthy):
        made.append(Incoming(job.trace, job.trace.name, "a sample", job.stored()))
    return made


def test_jobs_windows_and_findings_are_those_of_the_store(store: Store) -> None:
    windows = rows_of(store, 'SELECT job, "window", slowdown, headline FROM windows ORDER BY ALL').rows()
    history = [(job, *row) for job in ("healthy", "slow-worker") for row in _history(store, job)]
    assert windows == history
    jobs = rows_of(store, "SELECT job, windows, all_steps, slowdown FROM jobs ORDER BY job").rows()
    newest = store.history("slow-worker")["slowdown"][-1], store.history("healthy")["slowdown"][-1]
    assert jobs == [("healthy", 1, 12, newest[1]), ("slow-worker", 2, 24, newest[0])]
    ((kind, ranks, hosts),) = rows_of(store, "SELECT kind, ranks, hosts FROM findings WHERE job = 'slow-worker'").rows()
    assert (kind, ranks, hosts) == ("bad-worker", [9], ["host-0001"])


def _history(store: Store, job: str) -> list[tuple[object, ...]]:
    return list(store.history(job).select("number", "slowdown", "headline").iter_rows())


def test_ops_are_those_of_the_traces(store: Store) -> None:
    trace = store.load("slow-worker", 1).ops
    found = rows_of(store, 'SELECT * FROM OPS WHERE "window" = 1', ["slow-worker"])
    assert found["job"].unique().to_list() == ["slow-worker"]
    stored = trace.with_columns(pl.col("kind").cast(pl.String)).sort(trace.columns)
    assert found.select(trace.columns).sort(trace.columns).rows() == stored.rows()
    counted = dict(rows_of(store, "SELECT job, count(*) FROM ops GROUP BY job").iter_rows())
    assert counted == {"healthy": 8928, "slow-worker": 2 * 8928}


@pytest.mark.parametrize(
    "time",
    [
        "'infinity'::TIMESTAMP",
        "'-infinity'::TIMESTAMPTZ",
        "'infinity'::TIMESTAMP_MS",
        "'infinity'::DATE",
        "'294247-01-09'::TIMESTAMP",
        "[NULL, '-infinity'::DATE]",
        "[{'a': 'infinity'::TIMESTAMP}]",
    ],
)
def test_a_time_that_cannot_be_shown_is_one_clear_error_and_its_text_can(time: str, store: Store) -> None:
    found = run("store", "sql", f"SELECT {time} AS t", "--store", store.path)
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert found.err.startswith("tracekit: t: has infinite times")
    assert rows_of(store, f"SELECT ({time})::VARCHAR AS t").height == 1


def test_times_that_polars_would_change_are_text(store: Store) -> None:
    found = rows_of(store, "SELECT 'infinity'::TIMESTAMP_S, 'infinity'::TIMESTAMP_NS, '2026-01-02'::TIMESTAMP_S")
    assert found.row(0) == ("infinity", "infinity", "2026-01-02 00:00:00")


def test_lists_of_tables_show_what_the_documentation_names(store: Store) -> None:
    assert rows_of(store, "SHOW TABLES")["name"].to_list() == ["findings", "incidents", "jobs", "windows"]


@pytest.mark.slow
def test_ctrl_c_ends_a_query(store: Store) -> None:
    """The sum of 10^13 products, in whatever of DuckDB's threads the signal arrives."""
    endless = "SELECT sum(a.range * b.range) FROM range(10000000) AS a, range(1000000) AS b"
    command = [sys.executable, "-m", "tracekit", "store", "sql", endless, "--store", str(store.path)]
    for more_cpu_s in (0.5, 1.5):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as asked:
            proc = Path("/proc", str(asked.pid))
            while "_duckdb" not in (proc / "maps").read_text():
                wait(asked)
            ticks = _ticks(proc) + more_cpu_s * os.sysconf("SC_CLK_TCK")
            while _ticks(proc) < ticks:
                wait(asked)
            asked.send_signal(signal.SIGINT)
            said = asked.communicate(timeout=60)[1].split("\n")
            assert ("interrupted" in said, "Traceback" in said[0], asked.returncode) == (True, False, 130)


def wait(asked: subprocess.Popen[str]) -> None:
    """A moment, in which it does not end."""
    select.select([asked.stderr], [], [], POLL_S)
    assert asked.poll() is None


def _ticks(proc: Path) -> int:
    """CPU time of a process, in clock ticks."""
    return sum(map(int, (proc / "stat").read_text().rpartition(")")[2].split()[11:13]))


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_questions_of_the_documentation_have_answers(question: str, store: Store) -> None:
    rows = rows_of(store, question)
    empty = ("HAVING", "FROM incidents")  # no host was blamed twice, no job became slower, no incident is open
    assert rows.height > 0 or any(words in question for words in empty)


def test_there_are_eleven_questions() -> None:
    assert len(QUESTIONS) == 11


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE stored.jobs",
        "COPY (SELECT 1) TO '{out}'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}'",
        "ATTACH '{out}'",
        "SELECT 1; SELECT 2",
        "SET threads = 1",
        "INSTALL httpfs",
        "",
        "SELECT * FROM read_text('{secret}')",
        "SELECT * FROM '{secret}'",
        "SELECT * FROM read_csv('{secret}'), ops",
        "SELECT * FROM query('COPY (SELECT 1) TO ''{out}''')",
        "SELECT * FROM glob('/*')",
        "SELEC 1",
        "SELECT nothing FROM jobs",
        "SELECT * FROM of_nobody",
        "SELECT error('no')",
    ],
)
def test_a_query_that_is_not_one_select_over_the_store_is_one_clear_error(
    query: str, store: Store, tmp_path: Path
) -> None:
    secret, out = tmp_path / "secret.csv", tmp_path / "out"
    secret.write_text("password\nhunter2\n")
    before = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    ran = run("store", "sql", query.format(secret=secret, out=out), "--store", store.path)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("tracekit: ")
    assert ran.err.count("\n") == 1
    assert "hunter2" not in ran.err
    assert not out.exists()
    assert {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()} == before


def test_every_format_has_the_same_rows(store: Store, tmp_path: Path) -> None:
    query = "SELECT job, cause_hosts, slowdown FROM windows ORDER BY ALL"
    rows = rows_of(store, query)
    words = ("store", "sql", query, "--store", store.path)
    assert json.loads(run(*words, "--json").out) == rows.to_dicts()
    csv = pl.read_csv(io.StringIO(run(*words, "--csv").out))
    assert csv["job"].to_list() == rows["job"].to_list()
    assert [None if text is None else json.loads(text) for text in csv["cause_hosts"]] == rows["cause_hosts"].to_list()
    for _ in range(2):  # the second time in place of the first
        assert run(*words, "--parquet", tmp_path / "rows.parquet").code == 0
        assert pl.read_parquet(tmp_path / "rows.parquet").equals(rows)
    assert "slow-worker" in run(*words).out


def test_of_many_rows_the_terminal_says_how_to_see_all(store: Store) -> None:
    few, many = (run("store", "sql", f"FROM range({count})", "--store", store.path).out for count in (50, 51))
    assert "--csv" not in few
    assert many.endswith("\n51 rows; --csv prints all\n")


def test_a_join_and_types_that_polars_lacks_can_be_printed(store: Store, tmp_path: Path) -> None:
    query = """SELECT 1 AS one, 2 AS one, INTERVAL 1 DAY AS day, [INTERVAL 1 DAY] AS days, '101'::BIT AS bits,
        'x'::BLOB AS bytes, union_value(a := 1) AS either FROM jobs JOIN findings USING (job)"""
    printed = run("store", "sql", query, "--json", "--store", store.path)
    row = {"one": 1, "one_1": 2, "day": "1 day", "days": "[1 day]", "bits": "101", "bytes": "x", "either": "1"}
    assert json.loads(printed.out) == [row]
    for words in ([], ["--csv"], ["--parquet", tmp_path / "rows.parquet"]):
        assert run("store", "sql", query, *words, "--store", store.path).code == 0
    both = rows_of(store, "SELECT * FROM jobs JOIN findings ON jobs.job = findings.job")
    assert both["job"].to_list() == both["job_1"].to_list() == ["slow-worker"]


def test_a_file_of_somebody_else_is_not_replaced(store: Store, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.parquet"
    pl.DataFrame({"a": [1]}).write_parquet(theirs)
    assert run("store", "sql", "SELECT 1", "--store", store.path, "--parquet", theirs).code == 2
    assert pl.read_parquet(theirs).columns == ["a"]


def test_names_cannot_leave_the_table(tmp_path: Path) -> None:
    job = load(str(SAMPLES / "healthy.parquet"))
    made = Store(tmp_path / "a store")
    made.append(Incoming(job.trace, "=1+1\x1b[31m'; DROP", "a sample"))
    words = ("store", "sql", "SELECT job FROM ops GROUP BY job", "--store", made.path)
    assert "\x1b" not in run(*words).out
    assert "'=1+1" in run(*words, "--csv").out
    assert json.loads(run(*words, "--json").out) == [{"job": "=1+1\x1b[31m'; DROP"}]


def test_pruned_ops_and_lost_files_are_said(store: Store, tmp_path: Path) -> None:
    job = load(str(SAMPLES / "healthy.parquet"))
    made = Store(tmp_path / "a store")
    made.append(Incoming(job.trace, "healthy", "a sample"))
    (made.path / "jobs" / "1" / "0.parquet").write_bytes(b"PAR1")
    lost = run("store", "sql", "FROM ops", "--store", made.path)
    assert lost.code == 2
    assert "store repair" in lost.err
    assert run("store", "prune", "--max-size", "0", "--store", made.path).code == 0
    with pytest.raises(SelectionError, match="no window has ops"):
        rows_of(made, "FROM ops")
    assert rows_of(made, "SELECT count(*) FROM windows").item() == 1


def test_duckdb_itself_agrees_with_the_totals(store: Store) -> None:
    with duckdb.connect(str(store.path / "catalog.duckdb"), read_only=True) as catalogue:
        (total,) = catalogue.sql("SELECT sum(lost_gpu_hours) FROM windows").fetchall()[0]
    assert rows_of(store, "SELECT sum(lost_gpu_hours) FROM windows").item() == total
