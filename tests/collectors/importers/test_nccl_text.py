"""Text about a hang: messages of watchdogs and reports of RAS give the verdict that they hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.handmade import run
from tracekit.analysis.hang.hang_culprits import find_hang
from tracekit.analysis.hang.hang_report import HangReport, StallClass
from tracekit.base.errors import FormatError
from tracekit.collectors.importers.nccl_text import read_nccl_text

WORK = "WorkNCCL(SeqNum={}, OpType={}, NumelIn={}, NumelOut={}, Timeout(ms)=600000) ran for 600096 milliseconds"
MISMATCH = "#0-0 (78db921d1c117b4a) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"


def line(rank: int, message: str, group: str = "default_pg", second: int = 11) -> str:
    clock = f"[E810 03:04:{second}.061727749 ProcessGroupNCCL.cpp:683]"
    return f"[rank{rank}]:{clock} [PG ID 0 PG GUID 0({group}) Rank {rank}] {message}\n"


def timed_out(rank: int, number: int, operation: str = "BROADCAST", *, elements: int = 80, enqueued: int = 79) -> str:
    status = f"last enqueued work: {enqueued}, last completed work: {number - 1}"
    work = WORK.format(number, operation, elements, elements)
    return line(rank, f"Watchdog caught collective operation timeout: {work} before timing out.") + line(
        rank, f"failure detected by watchdog at work sequence id: {number} PG status: {status}"
    )


def signalled(rank: int, enqueued: int, completed: int) -> str:
    counts = f"Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    return line(rank, f"Received a dump signal due to a collective timeout from rank 1. {counts}")


def report(path: Path, text: str) -> HangReport:
    path.write_text(f"Traceback of something else\n{text}")
    record = read_nccl_text(path)
    assert record is not None
    return find_hang(record)


def test_ranks_that_have_completed_all_that_they_enqueued_hold_the_others_up(tmp_path: Path) -> None:
    waits = "".join(timed_out(rank, 78) for rank in (1, 2, 3))
    one = report(tmp_path / "stderr", waits + signalled(0, 77, 77) + signalled(4, 77, 77))
    assert {culprit.rank: culprit.stall_class for culprit in one.culprits} == {0: StallClass.HOST, 4: StallClass.HOST}
    assert one.headline == "HANG  2 ranks hold up 3 others (5 of 5 ranks printed messages)"
    assert one.culprits[0].evidence[0].startswith("did not issue broadcast 78 of default_pg, where ranks 1, 2, 3 wait")
    assert one.culprits[0].since_s == 600.096
    assert any("ranks 0, 4 completed all that was enqueued" in note for note in one.notes)


def test_a_rank_that_was_signalled_while_it_waits_is_no_culprit(tmp_path: Path) -> None:
    """It has enqueued what the others wait in, and not timed out yet."""
    one = report(tmp_path / "stderr", timed_out(1, 78) + signalled(2, 79, 77) + signalled(0, 77, 77))
    assert [culprit.rank for culprit in one.culprits] == [0]
    assert [waiting.rank for waiting in one.waiting] == [1, 2]


def test_a_timeout_that_names_no_group_is_in_that_of_its_counters(tmp_path: Path) -> None:
    """Rank 2 is not in tp_0, whose ranks wait: nobody can say who is late, and rank 2 is not."""
    text = "".join(timed_out(rank, 78).replace("default_pg", "tp_0") for rank in (0, 1, 3))
    bare = text.replace("[PG ID 0 PG GUID 0(tp_0) Rank 0] Watchdog", "[Rank 0] Watchdog")
    assert bare != text
    found, same = report(tmp_path / "bare", bare), report(tmp_path / "named", text)
    assert found.culprits == same.culprits == ()
    assert [(one.rank, one.group) for one in found.waiting] == [(rank, "tp_0") for rank in (0, 1, 3)]


def test_a_timeout_without_group_and_counters_is_of_all_ranks(tmp_path: Path) -> None:
    """And a clock that no calendar has says nothing of when it was printed."""
    bare = "".join(timed_out(rank, 78).splitlines(keepends=True)[0] for rank in (1, 2)).replace("E810 ", "E899 ")
    one = report(tmp_path / "bare", re.sub(r"\[PG ID 0 PG GUID 0\(default_pg\) Rank (\d)\]", r"[Rank \1]", bare))
    assert [(waiting.rank, waiting.group) for waiting in one.waiting] == [(1, "default_pg"), (2, "default_pg")]
    assert [culprit.rank for culprit in one.culprits] == [0]
    assert one.culprits[0].since_s is None


def test_zeros_where_a_node_died_do_not_hide_the_messages(tmp_path: Path) -> None:
    text = "".join(timed_out(rank, 78) for rank in (1, 2, 3)) + signalled(0, 77, 77)
    assert [one.rank for one in report(tmp_path / "log", text + 4096 * "\0").culprits] == [0]


def test_messages_of_several_files_are_of_one_job_and_calls_are_compared(tmp_path: Path) -> None:
    for rank, elements in enumerate((1025, 1025, 1025, 7)):
        text = timed_out(rank, 39, "ALLREDUCE", elements=elements, enqueued=39)
        (tmp_path / f"rank{rank}.err").write_text(text)
    record = read_nccl_text(tmp_path)
    assert record is not None
    assert {one.rank: one.stall_class for one in find_hang(record).culprits} == {3: StallClass.MISMATCH}


def test_text_at_the_end_of_a_long_log_is_found_by_every_command(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("a line of training\n" * 20_000 + timed_out(1, 78) + signalled(0, 77, 77))
    assert run("hang", log).code == 3
    assert "rank 0: host stuck" in run(log).out
    assert (
        f"messages of NCCL's watchdog about ranks of a hung job; type `tracekit hang {log}`" in run("whatif", log).err
    )


def test_ras_names_the_rank_that_has_launched_less(tmp_path: Path) -> None:
    text = (
        f"{MISMATCH}  7 ranks have launched up to operation 64\n"
        "  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1\n"
    )
    one = report(tmp_path / "ras", text)
    assert [(culprit.rank, culprit.host) for culprit in one.culprits] == [(7, "node1")]
    assert one.headline == "HANG  1 rank holds up 7 others (8 of 8 ranks answered RAS)"
    assert "did not issue allreduce 61 of communicator #0-0" in one.culprits[0].evidence[0]
    assert "rank 7 is process 1650386 on node1, GPU 3" in one.notes


def test_ras_lists_the_ranks_of_a_count_below_it(tmp_path: Path) -> None:
    listed = "".join(f"  Rank {rank} -- GPU {rank} managed by process {rank} on node a\n" for rank in (0, 2))
    ahead = report(tmp_path / "ras", f"{MISMATCH}  4 ranks have not launched any operations\n"
                   f"  2 ranks have launched up to operation 3\n{listed}")  # fmt: skip
    assert [culprit.rank for culprit in ahead.culprits] == [1, 3, 4, 5]
    assert "hold up 2 others" in ahead.headline


def test_text_that_names_nobody_is_one_error_with_what_it_does_say(tmp_path: Path) -> None:
    gone = "  Process 3487984 on node 172.16.64.213 managing GPU 5\n"
    for text, words in (
        (f"{MISMATCH}  Rank 1 has launched up to operation 60\n{gone}", "process 3487984 on node 172.16.64.213"),
        (MISMATCH, "names no rank which others wait for"),
        ("Watchdog caught collective operation timeout\n", "names no rank; give all that the ranks printed"),
    ):
        (tmp_path / "text").write_text(text)
        with pytest.raises(FormatError, match=words):
            read_nccl_text(tmp_path / "text")
    with pytest.raises(FormatError, match="absent: no such file or folder"):
        read_nccl_text(tmp_path / "absent")
    (tmp_path / "text").write_text("nothing\n")
    assert read_nccl_text(tmp_path / "text") is None
