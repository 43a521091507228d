"""Verdicts on simulated jobs whose truth is known: `judges/hangsim.py` shares no code with the analysis."""

import random

import pytest

from judges.hangsim import Fault, HangJob, draw_faults, dumps, run, write
from tracekit.analysis.hang.hang_culprits import find_hang
from tracekit.analysis.hang.hang_report import StallClass
from tracekit.collectors.importers.flight_recorder import read_flight_records

TP2_PP2_DP2 = (2, 2, 2)


def verdict(folder, sizes, faults, *, drop=(), change=None, **options):
    """The report on a job with these faults, and the faults that came to pass."""
    job = HangJob(*sizes)
    outcome = run(job, faults)
    content = dumps(job, faults, outcome, **options)
    for rank in drop:
        del content[rank]
    if change is not None:
        change(content)
    write(folder, content)
    return find_hang(read_flight_records(folder)), outcome.struck


def named(report):
    return {culprit.rank: culprit.stall_class for culprit in report.culprits}


def test_a_rank_that_stops_issuing_is_named_and_those_that_wait_are_not(tmp_path):
    report, _ = verdict(tmp_path, TP2_PP2_DP2, [Fault("host", 5, 24)])
    assert named(report) == {5: StallClass.SILENT}  # all it had issued is finished: its dump has no entries
    assert sorted(one.rank for one in report.waiting) == [0, 1, 2, 3, 4, 6, 7]
    assert report.culprits[0].waiting == 7


def test_a_rank_with_finished_entries_in_its_dump_is_stuck_on_the_host(tmp_path):
    def with_history(content):
        entry = {**content[4]["entries"][0], "state": "completed", "record_id": 1, "collective_seq_id": 900}
        content[5]["entries"] = [entry]

    report, _ = verdict(tmp_path, TP2_PP2_DP2, [Fault("host", 5, 24)], change=with_history)
    assert named(report) == {5: StallClass.HOST}
    assert "did not issue" in report.culprits[0].evidence[0]


def test_what_peers_have_finished_and_one_rank_has_not_is_its_device(tmp_path):
    report, _ = verdict(tmp_path, (4, 2, 2), [Fault("gpu-error", 6, 29, lag=4)])
    assert named(report) == {6: StallClass.DEVICE}
    assert "is finished on ranks 4, 5, 7 and not here" in report.culprits[0].evidence[0]


def test_a_device_that_has_not_begun_what_its_peers_have_is_named(tmp_path):
    report, _ = verdict(tmp_path, (4, 2, 2), [Fault("gpu-sleep", 6, 31)], timing=True)
    assert named(report) == {6: StallClass.DEVICE}


def test_without_start_times_nobody_is_blamed_and_what_is_missing_is_said(tmp_path):
    report, _ = verdict(tmp_path, (4, 2, 2), [Fault("gpu-sleep", 6, 31)])
    assert report.culprits == ()
    (question,) = report.undecided
    assert question.ranks == (4, 5, 6, 7)
    assert "TORCH_NCCL_ENABLE_TIMING=1" in question.missing


def test_a_call_of_another_size_names_the_rank_and_shows_both_calls(tmp_path):
    report, _ = verdict(tmp_path, (4, 2, 2), [Fault("size", 6, 32)])
    assert named(report) == {6: StallClass.MISMATCH}
    assert "rank 4: _reduce_scatter_base [[8192, 1]]" in report.culprits[0].evidence[0]
    assert "rank 6: _reduce_scatter_base [[16384, 1]]" in report.culprits[0].evidence[0]


def test_a_skipped_collective_names_the_rank_that_skipped_it(tmp_path):
    report, _ = verdict(tmp_path, (4, 2, 2), [Fault("skip", 6, 22)])
    assert named(report) == {6: StallClass.MISMATCH}


def test_of_two_members_the_one_out_of_step_with_other_groups_has_left_a_call_out(tmp_path):
    """Ranks 14 and 15 call something else each; what 15 calls next, other pairs call under the same number."""
    report, _ = verdict(tmp_path, (2, 4, 2), [Fault("skip", 14, 28)])
    assert named(report) == {14: StallClass.MISMATCH}


def test_a_send_without_receive_names_the_end_that_went_past(tmp_path):
    report, struck = verdict(tmp_path, (1, 2, 1), [Fault("partner", 1, 24)])
    assert named(report) == {struck[0].rank: StallClass.PARTNER}


def test_all_to_alls_of_different_sizes_belong_together(tmp_path):
    def as_all_to_all(content):
        for rank, dump in content.items():
            for entry in dump["entries"]:
                if entry["process_group"][1].startswith("TENSOR"):
                    entry["profiling_name"] = "nccl:all_to_all"
                    entry["input_sizes"] = [[1000 + rank, 1]]

    report, _ = verdict(tmp_path, (4, 2, 2), [Fault("host", 6, 31)], change=as_all_to_all)
    assert named(report) == {6: StallClass.SILENT}


def test_a_rank_without_dump_that_all_members_wait_for_is_gone(tmp_path):
    report, _ = verdict(tmp_path, TP2_PP2_DP2, [Fault("gone", 5, 24)])
    assert named(report) == {5: StallClass.GONE}
    assert report.without_dump == (5,)


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 6, 7])
def test_a_lost_dump_of_a_rank_that_merely_waits_blames_nobody(tmp_path, lost):
    report, _ = verdict(tmp_path, TP2_PP2_DP2, [Fault("gpu-error", 5, 29, lag=3)], drop=[lost])
    assert named(report) == {5: StallClass.DEVICE}
    assert lost in report.without_dump


def test_stalls_that_do_not_wait_for_each_other_are_apart(tmp_path):
    """Two pipelines of one rank each per stage: nothing joins them before the gradients are reduced."""
    report, _ = verdict(tmp_path, (4, 1, 2), [Fault("host", 1, 3), Fault("host", 6, 3)])
    assert {one.rank: one.stall for one in report.culprits} == {1: 0, 6: 1}
    assert [one.waiting for one in report.culprits] == [3, 3]


def test_a_dump_that_is_older_than_what_its_peers_finished_is_no_evidence(tmp_path):
    """Rank 6's file is of an earlier moment: it says nothing about where rank 6 stands now."""

    def outdated(content):
        content[6]["entries"] = []
        for status in content[6]["pg_status"].values():
            status["last_enqueued_collective"] = status["last_completed_collective"] = 900

    report, _ = verdict(tmp_path, (4, 2, 2), [Fault("gpu-error", 5, 29, lag=4)], change=outdated)
    assert named(report) == {5: StallClass.DEVICE}
    assert "the dump of rank 6 is older than those of its peers" in report.notes


def test_nobody_waits_in_a_job_whose_operations_are_all_finished(tmp_path):
    report, _ = verdict(tmp_path, TP2_PP2_DP2, [])
    assert not report.hang


@pytest.mark.parametrize("kind", ["host", "gone", "gpu-error"])
@pytest.mark.parametrize("seed", range(4))
def test_exactly_the_broken_ranks_are_named_in_any_layout(tmp_path, kind, seed):
    """Drawn layouts, versions and places; groups cut at three members; clocks of hosts apart by up to 0.3 s."""
    chance = random.Random(seed)
    sizes = chance.choice([(2, 2, 2), (4, 2, 2), (2, 4, 2), (2, 2, 4)])
    faults = draw_faults(HangJob(*sizes), kind, 1, chance)
    report, struck = verdict(
        tmp_path,
        sizes,
        faults,
        version=chance.choice(["2.1", "2.4", "2.10"]),
        cut=None if kind == "gone" else chance.choice([None, 3]),
    )
    assert sorted(named(report)) == sorted(fault.rank for fault in struck)


def test_equal_stacks_are_one_group_and_the_few_come_first(tmp_path):
    def with_stacks(content):
        for rank, dump in content.items():
            dump["tracekit"] = {"rank": rank, "stack": ["train.py:9 lock" if rank == 5 else "c10d.py:7 all_reduce"]}

    report, _ = verdict(tmp_path, TP2_PP2_DP2, [Fault("host", 5, 24)], change=with_stacks)
    assert [(one.ranks, one.frames) for one in report.stacks] == [
        ((5,), ("train.py:9 lock",)),
        ((0, 1, 2, 3, 4, 6, 7), ("c10d.py:7 all_reduce",)),
    ]


def small_dump(groups, *entries):
    """A dump of gloo: `groups` name -> ranks, entries (group, name, sequence, finished)."""
    config = {name: {"name": name, "desc": name, "ranks": str(ranks)} for name, ranks in groups.items()}
    rows = [
        {
            "record_id": number,
            "pg_id": list(groups).index(group),
            "process_group": (group, group),
            "collective_seq_id": sequence,
            "p2p_seq_id": 1 if " " in name else 0,
            "profiling_name": f"gloo:{name}",
            "time_created_ns": 1_000_000_000 + number,
            "input_sizes": [[4]],
            "output_sizes": [[4]],
            "input_dtypes": ["Float"],
            "state": "started" if " " in name else "scheduled",
            "retired": finished,
            "is_p2p": " " in name,
        }
        for number, (group, name, sequence, finished) in enumerate(entries)
    ]
    return {"version": "2.10", "pg_config": config, "entries": rows}


@pytest.mark.parametrize("transfer", ["recv 0<-1", "send 0->1"])
def test_a_rank_that_left_a_call_out_and_waits_for_one_who_waits_in_it_is_a_mismatch(tmp_path, transfer):
    """Three of four wait in the world's all-reduce 2, which rank 1 never calls. It has reduced gradients with rank 3 as
    often as rank 3, so it is past its step, and waits in a transfer for rank 0.
    """
    stands = [("grads", "all_reduce", 7, True), ("world", "all_reduce", 2, False)]
    write(tmp_path, four_ranks(stands, [("grads", "all_reduce", 7, True), ("pipe", transfer, 0, False)]))
    report = find_hang(read_flight_records(tmp_path))
    assert named(report) == {1: StallClass.MISMATCH}
    assert "it left a call out, or calls in another order" in report.culprits[0].evidence[0]


def test_a_rank_that_is_behind_in_its_other_groups_has_left_no_call_out(tmp_path):
    """Rank 1 still sends the step that the others have ended: rank 0 has not received it."""
    stands = [("grads", "all_reduce", 7, True), ("world", "all_reduce", 2, False)]
    write(tmp_path, four_ranks(stands, [("grads", "all_reduce", 6, True), ("pipe", "send 0->1", 0, False)]))
    report = find_hang(read_flight_records(tmp_path))
    assert named(report) == {0: StallClass.PARTNER}


def four_ranks(stands, of_rank_1):
    """Two stages of two ranks: 1 and 0 are a pipeline, 1 and 3 reduce gradients together. Ranks 0, 2, 3 stand alike."""
    world, pipes, pairs = [0, 1, 2, 3], {0: [1, 0], 1: [1, 0], 2: [3, 2], 3: [3, 2]}, {0: [0, 2], 1: [1, 3]}
    dumps = {}
    for rank in world:
        groups = {"world": world, "grads": pairs[rank % 2], "pipe": pipes[rank]}
        calls = [("world", "all_reduce", 1, True), *(of_rank_1 if rank == 1 else stands)]
        dumps[rank] = small_dump(groups, *calls)
    return dumps


def test_two_ranks_that_call_in_opposite_order_are_not_told_apart(tmp_path):
    """One waits in group a, the other in group b, two members each: no majority says which order is right."""
    groups = {"a": [0, 1], "b": [1, 0]}
    write(
        tmp_path,
        {
            0: small_dump(groups, ("a", "all_reduce", 1, True), ("a", "all_reduce", 2, False)),
            1: small_dump(groups, ("a", "all_reduce", 1, True), ("b", "all_reduce", 1, False)),
        },
    )
    report = find_hang(read_flight_records(tmp_path))
    assert report.culprits == ()
    assert report.undecided[0].ranks == (0, 1)


def test_a_peer_beyond_the_members_that_are_listed_is_a_rank_too(tmp_path):
    """Lists are cut; rank 3 left no dump, and rank 0 sends to it."""
    groups = {"default_pg": "[0, 1, ...]"}
    waits = ("default_pg", "all_reduce", 2, False)
    dumps = {rank: small_dump(groups, ("default_pg", "all_reduce", 1, True), waits) for rank in (1, 2)}
    dumps[0] = small_dump(groups, ("default_pg", "all_reduce", 1, True), ("default_pg", "send 0->3", 0, False))
    write(tmp_path, dumps)
    report = find_hang(read_flight_records(tmp_path))
    assert report.world_size == 4
    assert named(report) == {3: StallClass.GONE}


def test_what_a_group_has_called_before_does_not_tell_whose_call_is_right(tmp_path):
    """Of two ranks one calls what both have called ever since: the other may have left that out, or called too much."""
    groups = {"world": [0, 1]}
    history = [("world", "all_reduce", number, True) for number in range(1, 10)]
    calls = {0: "all_reduce", 1: "broadcast"}
    write(tmp_path, {rank: small_dump(groups, *history, ("world", name, 10, False)) for rank, name in calls.items()})
    assert named(find_hang(read_flight_records(tmp_path))) == {0: StallClass.MISMATCH, 1: StallClass.MISMATCH}


def test_a_receive_that_nobody_has_sent_to_is_told_beside_a_stuck_host(tmp_path):
    """Posted ahead of need, or where the rank stands: the dump does not say."""
    groups = {"world": [0, 1], "pipe": [0, 1]}
    done, posted = ("world", "all_reduce", 1, True), small_dump(groups, ("pipe", "recv 0<-1", 0, False))["entries"][0]
    first = small_dump(groups, done)
    first["entries"].append(posted | {"record_id": 1, "state": "scheduled"})
    write(tmp_path, {0: first, 1: small_dump(groups, done, ("world", "all_reduce", 2, False))})
    report = find_hang(read_flight_records(tmp_path))
    assert named(report) == {0: StallClass.HOST}
    assert "it has posted a receive that rank 1 has not sent to" in report.culprits[0].evidence[-1]
