"""Reasons of a hang are those that the dumps hold: starts, counters, missing records; and counts add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judges.hangsim import write
from tests.analysis.hang.test_verdict import small_dump
from tests.cases import case
from tests.handmade import run
from tracekit.analysis.hang.hang_culprits import find_hang
from tracekit.analysis.hang.hang_report import HangReport, StallClass
from tracekit.collectors.importers.flight_recorder import read_flight_records

RANKS = 4
GROUPS = {"world": list(range(RANKS))}


def nccl(*states: str, first: int = 1, started_ns: int | None = None, **change: Any) -> dict[str, Any]:
    """A dump of NCCL with calls in these states, from number `first` on."""
    dump = small_dump(GROUPS, *(("world", "all_reduce", first + place, False) for place in range(len(states))))
    for entry, state in zip(dump["entries"], states, strict=True):
        begun = started_ns if state != "scheduled" else None
        entry.update(profiling_name="nccl:all_reduce", state=state, retired=False, time_discovered_started_ns=begun)
        entry.update(change)
    return dump


def report_on(folder: Path, dumps: dict[int, dict[str, Any]]) -> HangReport:
    write(folder, dumps)
    return find_hang(read_flight_records(folder))


def test_ranks_that_are_all_alike_have_no_culprit_and_the_order_of_streams_is_the_finding(tmp_path: Path) -> None:
    """Call 2 is enqueued on all, and call 3, issued after it, has started."""
    dump = nccl("completed", "scheduled", "started", "scheduled", started_ns=5)
    report = report_on(tmp_path, dict.fromkeys(range(RANKS), dump))
    assert report.culprits == ()
    (question,) = report.undecided
    assert (question.alike, question.ranks) == (True, (0, 1, 2, 3))
    assert "all_reduce 2 of world is enqueued on all of them and has started on none, while all_reduce 3" in (
        question.missing
    )
    assert (
        report.headline == "HANG  4 ranks wait, all in the same state: no rank holds them up (4 of 4 ranks left a dump)"
    )
    ran = run("hang", tmp_path)
    assert ran.code == 3
    assert "ranks 0-3 are alike" in ran.out
    assert "TORCH_NCCL_ENABLE_TIMING" not in ran.out


def test_no_timing_is_asked_for_where_starts_are_recorded(tmp_path: Path) -> None:
    """By the time of a start, or by the group's status; -1 is that of a recorder without timing."""
    for name, dump, asked in (
        ("times", nccl("completed", "scheduled", started_ns=5), False),
        ("status", nccl("completed", "scheduled") | {"pg_status": status(2, 1, started=1)}, False),
        ("neither", nccl("completed", "scheduled") | {"pg_status": status(2, 1, started=-1)}, True),
    ):
        (question,) = report_on(tmp_path / name, dict.fromkeys(range(RANKS), dump)).undecided
        assert ("TORCH_NCCL_ENABLE_TIMING=1" in question.missing) is asked, name
        assert question.alike is not asked


def status(enqueued: int, completed: int, started: int = -1) -> dict[str, dict[str, int]]:
    last = {"enqueued": enqueued, "started": started, "completed": completed}
    return {"0": {f"last_{word}_collective": number for word, number in last.items()}}


def test_a_rank_whose_dump_has_no_entries_is_locked_or_elsewhere_with_its_counters(tmp_path: Path) -> None:
    waits = nccl("scheduled", first=78) | {"pg_status": status(78, 77)}
    dumps = dict.fromkeys(range(1, RANKS), waits) | {0: nccl() | {"pg_status": status(77, 77)}}
    report = report_on(tmp_path, dumps)
    (culprit,) = report.culprits
    assert (culprit.rank, culprit.stall_class) == (0, StallClass.SILENT)
    assert culprit.evidence[0] == "its dump has no entries; 77 enqueued and as many completed in world"
    step = report.first_step
    assert step is not None
    assert step.startswith("py-spy dump --pid PID")


def test_culprits_and_those_that_they_hold_up_are_no_more_than_there_are(tmp_path: Path) -> None:
    """Two of five make another call; each of the two also waits in that call with the others."""
    world = {"world": list(range(5))}
    dumps = {rank: small_dump(world, ("world", "broadcast" if rank in (1, 3) else "all_reduce", 1, False))
             for rank in range(5)}  # fmt: skip
    report = report_on(tmp_path, dumps)
    assert [culprit.rank for culprit in report.culprits] == [1, 3]
    assert report.headline.startswith("HANG  2 ranks hold up 3 others (5 of 5")


def test_records_that_are_missing_are_doubt_unless_only_unfinished_ones_are_dumped(tmp_path: Path) -> None:
    """Rank 0 has not issued call 4; its dump lacks record 1, which may have been that call, of another number."""
    waits = nccl("completed", "completed", "completed", "scheduled")
    whole, cut = nccl("completed", "completed", "completed"), nccl("completed", "completed", "completed")
    del cut["entries"][1]
    for name, dump, named in (("whole", whole, [0]), ("cut", cut, [])):
        report = report_on(tmp_path / name, dict.fromkeys(range(1, RANKS), waits) | {0: dump})
        assert [culprit.rank for culprit in report.culprits] == named, name
        assert any("without record 1" in note for note in report.notes) is (name == "cut")
    unfinished = nccl("completed", "scheduled", "scheduled", "scheduled", first=2)
    del unfinished["entries"][0], unfinished["entries"][1]
    assert report_on(tmp_path / "active", dict.fromkeys(range(RANKS), unfinished)).notes == ()


def test_what_has_started_on_all_is_a_question_to_the_network(tmp_path: Path) -> None:
    report = report_on(tmp_path, dict.fromkeys(range(RANKS), nccl("completed", "started", started_ns=5)))
    assert report.culprits == ()
    (question,) = report.undecided
    assert (question.ranks, question.alike) == ((0, 1, 2, 3), False)
    assert question.missing.startswith("it has started on all of them: the logs of their network cards and switches")


def test_a_rank_is_gone_if_its_process_ended_or_its_dump_is_torn(tmp_path: Path) -> None:
    """The others wait in call 3."""
    ended = nccl() | {"tracekit": {"rank": 0, "process": "ended with exit code 137"}}
    for name, dump, sign in (
        ("ended", ended, "ended with exit code 137"),
        ("torn", None, "its dump is torn or damaged"),
    ):
        with case(name):
            waits = nccl("completed", "completed", "scheduled") | {"pg_status": status(3, 2)}
            dumps = dict.fromkeys(range(RANKS), waits) | ({0: dump} if dump is not None else {})
            write(tmp_path / name, dumps)
            if dump is None:
                file = tmp_path / name / "nccl_trace_rank_0"
                file.write_bytes(file.read_bytes()[:99])
            (culprit,) = find_hang(read_flight_records(tmp_path / name)).culprits
            assert (culprit.rank, culprit.stall_class, culprit.waiting) == (0, StallClass.GONE, 3)
            assert culprit.evidence[0].startswith(sign)


def test_a_call_whose_tensors_are_damaged_may_be_another_one(tmp_path: Path) -> None:
    """All are in call 1, and rank 1's dump does not say of how many elements; or rank 2 also calls it with twice as
    many, which rank 1 may call, too.
    """
    waits, damaged, larger = (nccl("scheduled", input_sizes=sizes) for sizes in ([[4]], 7, [[8]]))
    (question,) = report_on(tmp_path / "alike", dict.fromkeys(range(RANKS), waits) | {1: damaged}).undecided
    assert question.ranks == (0, 1, 2, 3)
    assert question.missing == "what rank 1 called is damaged in the dump: the calls may differ"
    report = report_on(tmp_path / "apart", dict.fromkeys(range(RANKS), waits) | {1: damaged, 2: larger})
    assert report.culprits == ()
    report = report_on(tmp_path / "stated", dict.fromkeys(range(RANKS), waits) | {2: larger})
    assert [(culprit.rank, culprit.stall_class) for culprit in report.culprits] == [(2, StallClass.MISMATCH)]


def test_a_transfer_whose_peer_is_not_named_holds_nobody_responsible(tmp_path: Path) -> None:
    parts = small_dump(GROUPS, ("world", "send 0->1", 0, False))
    parts["entries"][0].update(profiling_name="nccl:coalesced", pg_id=-7)  # of a group without a number
    (question,) = report_on(tmp_path, {0: parts} | dict.fromkeys((1, 2, 3), nccl("completed"))).undecided
    assert (question.ranks, question.missing) == (
        (0,),
        "its peer is unknown: the dumps do not say which rank of the job it is",
    )


def test_whether_a_transfer_was_received_is_known_from_finished_operations_alone(tmp_path: Path) -> None:
    """Rank 0 sends to rank 1, which waits for rank 0 in another group."""
    groups = {"world": [0, 1], "pipe": [0, 1]}
    sends = small_dump(groups, ("world", "all_reduce", 1, True), ("pipe", "send 0->1", 0, False))
    waits, done = ("world", "all_reduce", 2, False), ("world", "all_reduce", 1, True)
    (question,) = report_on(tmp_path / "bare", {0: sends, 1: small_dump(groups, waits)}).undecided
    assert question.ranks == (0, 1)
    assert question.missing.startswith("whether rank 1 has received it is not recorded: dump with finished operations")
    (culprit,) = report_on(tmp_path / "whole", {0: sends, 1: small_dump(groups, done, waits)}).culprits
    assert (culprit.rank, culprit.stall_class) == (1, StallClass.PARTNER)


def test_a_dump_that_is_older_than_those_of_its_peers_does_not_excuse_its_rank(tmp_path: Path) -> None:
    """Rank 1 has finished call 2, in which rank 2's device is, and which rank 0 has not issued by its dump. Rank 3
    waits for rank 0 alone.
    """
    groups = GROUPS | {"pair": [0, 3]}
    calls = [("world", "all_reduce", 1, True), ("world", "all_reduce", 2, True)]
    dumps = {
        0: small_dump(groups, calls[0]),
        1: small_dump(groups, *calls, ("world", "all_reduce", 3, False)),
        2: small_dump(groups, calls[0], ("world", "all_reduce", 2, False)),
        3: small_dump(groups, *calls, ("pair", "all_reduce", 1, False)),
    }
    report = report_on(tmp_path, dumps)
    assert {culprit.rank: culprit.stall_class for culprit in report.culprits} == {
        0: StallClass.GONE,
        2: StallClass.DEVICE,
    }
    assert report.culprits[0].evidence[0] == "its dump is older than those of its peers"
