"""`tracekit hang` as people and programs see it."""

import json

import pytest
from msgspec import structs

from judges.hangsim import Fault, HangJob, dumps, run, write
from tests import handmade
from tests.reports import hang_with
from tracekit.analysis.hang.hang_report import (
    HangCulprit,
    HangReport,
    StackGroup,
    StallClass,
    UndecidedStall,
    WaitingRank,
)
from tracekit.dashboards.terminal.hang_lines import report_lines
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


def test_a_job_is_one_of_a_store(tmp_path):
    result = handmade.run("hang", folder_of(tmp_path, []), "--job", "new")
    assert result.code == 2
    assert "--job chooses a hang in a store" in result.message


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


def culprit_of(rank: int, **more: object) -> HangCulprit:
    """A rank in its own code, with two pieces of evidence."""
    evidence = (f"first {rank}", "second")
    usual = HangCulprit(rank, None, StallClass.HOST, "tp", "all_reduce", 1.0, None, 0, 1, None, evidence, None)
    return structs.replace(usual, **more)


def test_the_lists_of_a_large_hang_are_cut_off_and_say_how_much_there_is_more() -> None:
    """21 culprits, five stacks, ranks that wait in 17 operations, two silent ranks and 17 notes."""
    frames = (*(f"f{number}" for number in range(7)), "x" * 79, "f8")
    stacks = [StackGroup((rank,), (f"at {rank}",)) for rank in (3, 4, 5)] + [StackGroup((30, 31, 32), ("usual",))]
    waiting = [WaitingRank(30 + at, (1,), f"op {at:02}", "tp") for at in range(17)]
    report = HangReport(
        hang=True, headline="HANG", first_step="look", world_size=64, dumps=62,
        culprits=tuple(map(culprit_of, range(21))),
        undecided=tuple(UndecidedStall((rank, rank + 1), "send", "which is last") for rank in (40, 50)),
        waiting=(*waiting, WaitingRank(60, (1,), "op 16", "tp")), groups=(),
        stacks=(StackGroup((2,), frames), *stacks), without_dump=(1, 62, 63),
        notes=tuple(f"n{number}" for number in range(17)),
    )  # fmt: skip
    assert list(report_lines(report)) == [
        "HANG",
        *("  rank 0: host stuck", "    first 0; second"),
        *("  rank 1: host stuck", "    first 1; second"),
        *("  rank 2: host stuck", "    first 2; second"),
        "  cannot tell which of ranks 40-41: which is last",
        "First: look",
        *("", "Further culprits", *(f"  rank {rank}: host stuck; first {rank}" for rank in range(3, 19))),
        "  and 2 more (--json lists all)",
        *("", "Stack of rank 2, innermost first", *(f"  f{number}" for number in range(7)), "  ..." + "x" * 75),
        *("", "Stack of rank 3, innermost first", "  at 3", "", "Stack of rank 4, innermost first", "  at 4"),
        *("", "Stack of ranks 30-32, innermost first", "  usual"),
        *("", "5 different stacks (--json has all)"),
        *("", "18 ranks wait", "  ranks 46, 60 in op 16 for rank 1"),
        *(f"  rank {30 + at} in op {at:02} for rank 1" for at in range(15)),
        "  and 1 more (--json lists all)",
        *("", "No dump of ranks 62-63: without it, nothing says whether they hang too or merely", "wait."),
        *("", *(f"Note: n{number}" for number in range(16))),
    ]  # fmt: skip


def test_a_small_hang_names_host_and_phase_and_asks_only_what_is_left_to_ask() -> None:
    words = "word " * 100
    culprits = (culprit_of(7, host="node-b", phase="backward", evidence=(words,)),
                culprit_of(8, stall_class=StallClass.MISMATCH, evidence=(words,)))  # fmt: skip
    report = HangReport(
        hang=True, headline="HANG", first_step=None, world_size=16, dumps=15, culprits=culprits,
        undecided=(UndecidedStall((3,), "send", "a"), UndecidedStall((4, 5), "send", "b", alike=True)),
        waiting=(), groups=(), stacks=(), without_dump=(9,), notes=(),
    )  # fmt: skip
    lines = list(report_lines(report))
    assert lines[:2] == ["HANG", "  rank 7 on node-b: host stuck, in backward"]
    assert [lines[3].endswith(" ..."), lines[4]] == [True, "  rank 8: mismatch"]
    assert len(lines[5:12]) == 7
    assert lines[-4:] == [
        "  cannot tell whether it is rank 3: a",
        "", "No dump of rank 9: without it, nothing says whether it hangs too or merely", "waits.",
    ]  # fmt: skip
    only = list(report_lines(structs.replace(report, culprits=culprits[:1], hang=False)))
    assert only[-2:] == ["  cannot tell whether it is rank 3: a", "  ranks 4-5 are alike: b"]
