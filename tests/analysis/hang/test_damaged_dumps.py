"""Dumps of hung jobs, shuffled or damaged: no innocent rank is named, and what is not concluded has a reason."""

import copy
import random

import pytest

from judges.hangsim import FAULTS, Fault, HangJob, draw_faults, dumps, run, write
from tracekit.analysis.hang.hang_culprits import find_hang
from tracekit.collectors.importers.flight_recorder import read_flight_records

FIELDS = (
    "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "profiling_name", "time_created_ns",
    "input_sizes", "input_dtypes", "state", "time_discovered_started_ns", "time_discovered_completed_ns", "is_p2p",
)  # fmt: skip
NO_VALUES = (None, "junk", "", -5, -1, 10**9, 2**40, 2**63, 2**70, float("nan"), float("inf"), 1.5, [], {}, [1], "12")


def verdict(folder, content):
    write(folder, content)
    return find_hang(read_flight_records(folder))


def named(report):
    return {culprit.rank for culprit in report.culprits}


def hung(chance):
    """The dumps of a drawn job that hangs."""
    job = HangJob(*chance.choice([(2, 2, 2), (4, 2, 2), (2, 4, 2), (1, 2, 2), (2, 1, 4)]))
    faults = draw_faults(job, chance.choice(FAULTS), chance.choice([1, 2]), chance)
    return dumps(job, faults, run(job, faults), timing=chance.random() < 0.3, status=chance.random() < 0.7)


def damage(dump, chance):
    """Give 1, 2, 5 or all entries an impossible value, or none, in a field."""
    entries, field = dump["entries"], chance.choice(FIELDS)
    for at in chance.sample(range(len(entries)), min(len(entries), chance.choice([1, 1, 2, 5, 1000]))):
        if chance.random() < 0.1:
            del entries[at][field]
        else:
            entries[at][field] = chance.choice(NO_VALUES)


@pytest.mark.parametrize("seed", range(12))
def test_the_order_of_entries_and_entries_that_are_repeated_change_nothing(tmp_path, seed):
    chance = random.Random(seed)
    content = hung(chance)
    changed = copy.deepcopy(content)
    for dump in changed.values():
        dump["entries"] += copy.deepcopy(dump["entries"][:3])
        chance.shuffle(dump["entries"])
    expected, found = verdict(tmp_path / "as it was", content), verdict(tmp_path / "changed", changed)
    assert found.culprits == expected.culprits
    assert found.undecided == expected.undecided
    assert found.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_damaged_entries_of_a_rank_accuse_nobody_else_and_what_is_lost_has_a_reason(tmp_path, seed):
    chance = random.Random(seed)
    content = hung(chance)
    expected = named(verdict(tmp_path / "as it was", content))
    for time in range(4):
        changed = copy.deepcopy(content)
        damage(changed[chance.choice(sorted(changed))], chance)
        report = verdict(tmp_path / f"damaged {time}", changed)
        assert named(report) <= expected
        assert named(report) == expected or report.notes or report.undecided


@pytest.mark.parametrize("number", [-5, "junk", None, 10**9])
def test_an_impossible_sequence_number_is_left_out_by_name(tmp_path, number):
    """Rank 5 stops, rank 4 waits. An entry of rank 4 has such a number; file, entry and value are stated."""
    job, faults = HangJob(2, 2, 2), [Fault("host", 5, 24)]
    content = dumps(job, faults, run(job, faults))
    entry = [one for one in content[4]["entries"] if one["process_group"][1].startswith("TENSOR")][1]
    entry["collective_seq_id"] = number
    report = verdict(tmp_path, content)
    assert named(report) == {5}
    note = report.notes[0]
    assert note.startswith(f"nccl_trace_rank_4: entry {entry['record_id']}: collective_seq_id is {number!r}")
    assert "rank 4 is not accused" in note


def test_damage_that_hides_nothing_costs_no_verdict(tmp_path):
    """A finished entry of rank 5, with later ones of its group in the dump, has no number: rank 5 is named for all
    that.
    """
    job, faults = HangJob(2, 2, 2), [Fault("host", 5, 24)]
    content = dumps(job, faults, run(job, faults))
    first = {**content[4]["entries"][0], "state": "completed", "record_id": 1, "collective_seq_id": 900}
    content[5]["entries"] = [{**first, "collective_seq_id": None}, {**first, "record_id": 2, "collective_seq_id": 901}]
    report = verdict(tmp_path, content)
    assert named(report) == {5}
    assert report.notes == ("nccl_trace_rank_5: entry 1: collective_seq_id is None",)


def test_numbers_that_no_peer_confirms_are_damage_not_progress(tmp_path):
    """Every entry of rank 2 has the number 2**40: nobody else is late for that."""
    job, faults = HangJob(2, 2, 2), [Fault("host", 5, 24)]
    content = dumps(job, faults, run(job, faults), status=False)
    for entry in content[2]["entries"]:
        entry["collective_seq_id"] = 2**40
    report = verdict(tmp_path, content)
    assert named(report) == {5}
    assert "rank 2" in " ".join(report.notes)


def test_a_dump_none_of_whose_entries_can_be_used_is_named_with_the_first_reason(tmp_path):
    job, faults = HangJob(2, 2, 2), [Fault("host", 5, 24)]
    content = dumps(job, faults, run(job, faults))
    entries = content[4]["entries"]
    for entry in entries:
        entry["collective_seq_id"] = None
    write(tmp_path, content)
    assert read_flight_records(tmp_path).notes == (
        (
            f"nccl_trace_rank_4 is damaged: entry {entries[0]['record_id']}: collective_seq_id is None; none of its"
            f" {len(entries)} entries can be used"
        ),
    )
