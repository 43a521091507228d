"""`tracekit hang` as people and programs see it."""

import json

import pytest

from judges.hangsim import Fault, HangJob, dumps, run, write
from tests import handmade
from tests.reports import hang_with
from tracekit.store import Incoming, Store
from tracekit.store.care import damages


def folder_of(tmp_path, faults):
    job = HangJob(4, 2, 2)
    write(tmp_path / "dumps", dumps(job, faults, run(job, faults)))
    return tmp_path / "dumps"


def test_the_first_ten_lines_say_who_why_and_what_to_do_first(tmp_path):
    result = handmade.run("hang", folder_of(tmp_path, [Fault("gpu-error", 6, 29, lag=4)]))
    lines = result.out.splitlines()
    assert result.code == 3
    assert lines[0] == "HANG  1 rank holds up 15 others (16 of 16 ranks left a dump)"
    top = "\n".join(lines[:10])
    assert "rank 6: device or network stuck" in top
    assert "is finished on ranks 4, 5, 7 and not here" in top.replace("\n    ", " ")
    assert "First: look for Xid errors" in top
    assert max(map(len, lines)) <= 80


def test_json_has_culprits_waiting_and_groups(tmp_path):
    result = handmade.run("hang", folder_of(tmp_path, [Fault("host", 6, 31)]), "--json")
    report = json.loads(result.out)
    assert result.code == 3
    (culprit,) = report["culprits"]
    assert {"rank", "host", "class", "group", "operation", "since_s", "evidence"} <= culprit.keys()
    assert (culprit["rank"], culprit["class"]) == (6, "interpreter locked, or idle in other code")
    assert [one["rank"] for one in report["waiting"]] == [rank for rank in range(16) if rank != 6]
    assert all(one.keys() == {"rank", "for", "operation", "group"} for one in report["waiting"])
    assert any(6 in group["not_issued"] for group in report["groups"])


def test_a_job_without_hang_exits_with_0(tmp_path):
    result = handmade.run("hang", folder_of(tmp_path, []))
    assert result.code == 0
    assert result.out.startswith("NO HANG")


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path):
    result = handmade.run("hang", tmp_path / "nowhere")
    assert result.code == 2
    assert len(result.err.splitlines()) == 1


@pytest.fixture
def store(tmp_path):
    """A store that keeps two hangs: of `old`, then of `new`."""
    kept = Store(tmp_path / "jobs.store")
    for job, rank in (("old", 1), ("new", 2)):
        kept.add_hang(job, [f"HANG  rank {rank}"], hang_with({"rank": rank}))
    return kept


def test_of_a_store_the_newest_hang_is_shown_or_that_of_a_job(store):
    assert [one.job for one in store.hangs()] == ["new", "old"]
    newest = handmade.run("hang", store.path)
    assert (newest.code, newest.out.splitlines()[1]) == (3, "HANG  rank 2")
    assert newest.out.startswith("new, 20")
    chosen = handmade.run("hang", store.path, "--job", "old", "--json")
    assert json.loads(chosen.out) == json.loads(json.dumps(hang_with({"rank": 1}).to_dict()))


def test_a_job_without_a_hang_is_one_clear_line(store):
    result = handmade.run("hang", store.path, "--job", "other")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "keeps no hang of a job 'other'" in result.err


def test_a_store_with_hangs_and_no_trace_takes_a_trace_and_passes_its_check(store):
    trace = handmade.slow_trace((0,), name="new")
    store.add([Incoming(trace, "new", "new.parquet")])
    assert [job.name for job in store.jobs()] == ["new"]
    assert list(damages(store)) == []
    assert len(store.hangs("new")) == 1


def test_a_damaged_report_is_left_out_by_name(store):
    (store.path / "hangs" / "0.json").write_text("[]")
    result = handmade.run("hang", store.path, "--job", "other")
    damaged, missing = result.err.splitlines()
    assert "0.json: not a report on a hang" in damaged
    assert "keeps no hang of a job 'other'" in missing
    assert result.code == 2
