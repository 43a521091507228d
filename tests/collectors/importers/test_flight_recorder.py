"""Dumps of flight recorders: what is read, what is evidence, what is refused."""

import contextlib
import gzip
import json
import pickle
import resource
import struct

import numpy as np
import pytest

from judges.hangsim import Fault, HangJob, dumps, run, write
from tests.cases import case
from tracekit.base.errors import FormatError
from tracekit.collectors.importers import flight_recorder, flight_recorder_entries
from tracekit.collectors.importers.flight_recorder import read_flight_records

FAULTS = [Fault("host", 5, 24)]


def content(sizes=(2, 2, 2), faults=FAULTS, **options):
    job = HangJob(*sizes)
    return dumps(job, faults, run(job, faults), **options)


def read(folder, dumped, **options):
    write(folder, dumped, **options)
    return read_flight_records(folder)


def test_groups_are_joined_by_description_and_ranks_whatever_they_are_called(tmp_path):
    dumped = content()
    for rank, dump in dumped.items():
        renamed = {name: str(int(name) + 100 * rank) for name in dump["pg_config"]}
        dump["pg_config"] = {renamed[name]: about for name, about in dump["pg_config"].items()}
        for entry in dump["entries"]:
            entry["process_group"] = (renamed[entry["process_group"][0]], entry["process_group"][1])
    found = read(tmp_path / "renamed", dumped)
    expected = read(tmp_path / "plain", content())
    assert found.groups == expected.groups
    assert found.operations.equals(expected.operations)


def test_lists_of_ranks_that_are_cut_are_completed_from_the_other_dumps(tmp_path):
    found = read(tmp_path / "cut", content((4, 2, 4), cut=3))
    expected = read(tmp_path / "whole", content((4, 2, 4)))
    assert {(one.description, one.ranks) for one in found.groups} == {
        (one.description, one.ranks) for one in expected.groups
    }


@pytest.mark.parametrize("lost", [9, 10, 11, 15, 27])
def test_a_rank_without_a_dump_is_still_in_the_groups_whose_lists_are_cut(tmp_path, lost):
    cut, whole = content((8, 2, 2), cut=3), content((8, 2, 2))
    del cut[lost], whole[lost]
    groups, expected = read(tmp_path / "cut", cut).groups, read(tmp_path / "whole", whole).groups
    assert {(group.description, group.ranks) for group in groups} == {
        (group.description, group.ranks) for group in expected
    }
    assert any(lost in group.ranks for group in groups)


def test_ends_of_transfers_are_ranks_of_the_job(tmp_path):
    """`send 0->1` in the pipeline group (1, 5) goes from rank 1 to rank 5."""
    found = read(tmp_path, content()).operations.filter(p2p=True, rank=1)
    assert set(found.select("source", "target").rows()) <= {(1, 5), (5, 1)}
    assert found.height


def test_json_reads_like_pickle(tmp_path):
    found = read(tmp_path / "json", json.loads(json.dumps(content()), object_hook=_int_keys), as_json=True)
    assert found.operations.equals(read(tmp_path / "pickle", content()).operations)


def _int_keys(mapping):
    return {int(key): value for key, value in mapping.items()} if set(mapping) == set(map(str, range(8))) else mapping


def test_gloo_marks_what_is_finished_as_retired(tmp_path):
    dumped = content()
    for entry in dumped[0]["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace("nccl", "gloo")
        entry["retired"] = True
    before = len(dumped[0]["entries"])
    found = read(tmp_path, dumped).operations.filter(rank=0)
    assert found["progress"].to_list() == [2] * before


def test_parts_of_a_coalesced_call_take_the_state_of_the_whole(tmp_path):
    dumped = content()
    part = next(entry for entry in dumped[1]["entries"] if entry["is_p2p"])
    whole = {**part, "profiling_name": "nccl:coalesced", "state": "completed", "record_id": part["record_id"] + 1}
    dumped[1]["entries"] = [part, whole]
    assert read(tmp_path, dumped).operations.filter(rank=1)["progress"].to_list() == [2]


def test_empty_and_torn_files_are_evidence(tmp_path):
    write(tmp_path, content())
    (tmp_path / "nccl_trace_rank_3").write_bytes(b"")
    torn = tmp_path / "nccl_trace_rank_6"
    torn.write_bytes(torn.read_bytes()[:500])
    found = read_flight_records(tmp_path)
    assert found.dumps[3].problem == "is empty"
    assert "torn" in found.dumps[6].problem
    assert len(found.notes) == 2


class _Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    write(tmp_path, content())
    (tmp_path / "nccl_trace_rank_3").write_bytes(pickle.dumps(_Malicious(tmp_path / "touched")))
    found = read_flight_records(tmp_path)
    assert "refused: it asks for" in found.dumps[3].problem
    assert not (tmp_path / "touched").exists()


def test_a_small_pickle_cannot_claim_the_memory(tmp_path, monkeypatch):
    """Twenty bytes that ask for a memo of 2**31 places."""
    monkeypatch.setattr(flight_recorder_entries, "LARGEST_GROWTH", 1 << 30)
    write(tmp_path, content())
    bomb = b"\x80\x02}r" + struct.pack("<I", 0x7FFFFFFF) + b"."
    (tmp_path / "nccl_trace_rank_3").write_bytes(bomb)
    assert "refused: it asks for more memory" in read_flight_records(tmp_path).dumps[3].problem


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    """A folder stands for any error of the file system."""
    with pytest.raises(flight_recorder_entries.UnreadableError, match=r"^cannot be read: Is a directory$"):
        flight_recorder_entries.read_dump(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    write(tmp_path, content())
    with (tmp_path / "nccl_trace_rank_3").open("wb") as file:
        file.truncate(10 << 30)
    assert "is 10.7 GB" in read_flight_records(tmp_path).dumps[3].problem


def test_values_of_other_types_make_a_dump_damaged_not_the_reader(tmp_path):
    dumped = content()
    dumped[3]["entries"] = [{"profiling_name": 5, "pg_id": []}]
    dumped[4]["pg_config"] = {"0": 7}
    found = read(tmp_path, dumped)
    assert {rank for rank, dump in found.dumps.items() if dump.problem} == {3, 4}


@pytest.mark.parametrize("ranks", ["[0, 99999999999]", "[0, 1, 2, 3, 4, 5, 6, 4194304]"])
def test_a_group_that_no_job_can_have_makes_a_dump_damaged(tmp_path, ranks):
    """What follows is as large as the job: a rank of that number would claim the memory."""
    dumped = content()
    dumped[3]["pg_config"]["0"]["ranks"] = ranks
    found = read(tmp_path, dumped)
    assert {rank for rank, dump in found.dumps.items() if dump.problem} == {3}
    assert found.world_size == 8


def test_files_that_are_no_dumps_are_left_alone(tmp_path):
    write(tmp_path, content())
    (tmp_path / "fault_injection.log").write_text("Rank 3, fault_type: GPU_ERROR")
    (tmp_path / "stderr_3.log").write_text("Traceback")
    assert read_flight_records(tmp_path).notes == ()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: folder.is_dir(), "no readable flight-recorder dump"),
        (lambda folder: (folder / "rank_0").write_bytes(b"\x80\x02]."), "it has no version"),
        (lambda folder: write(folder, {0: {"version": "1.5", "entries": []}}), "has version '1.5'"),
    ],
)
def test_a_folder_without_dumps_is_one_clear_error(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(FormatError, match=message):
        read_flight_records(tmp_path)


def test_two_dumps_of_one_rank_are_refused(tmp_path):
    write(tmp_path, content())
    (tmp_path / "old_3").write_bytes((tmp_path / "nccl_trace_rank_3").read_bytes())
    with pytest.raises(FormatError, match="are both dumps of rank 3"):
        read_flight_records(tmp_path)


def test_dumps_of_two_jobs_are_refused(tmp_path):
    write(tmp_path, content())
    write(tmp_path, {8: content((4, 2, 2))[8]})
    with pytest.raises(FormatError, match="different jobs: rank 0 is in a job of 8 ranks, rank 8 in one of 16"):
        read_flight_records(tmp_path)


def test_two_attempts_or_clocks_far_apart_are_noted(tmp_path):
    """Rank 3's newest operation is an hour older than those of the others."""
    dumped = content()
    for entry in dumped[3]["entries"]:
        entry["time_created_ns"] -= 3_600_000_000_000
    (note,) = read(tmp_path, dumped).notes
    assert "rank 3" in note
    assert "dumps of two attempts, or of hosts whose clocks differ" in note


def test_a_group_number_that_is_used_again_after_a_restart_begins_anew(tmp_path):
    """The history of rank 2 holds a first life of its groups, which counted higher: it is left out, with a note."""
    dumped = content()
    expected = read(tmp_path / "one life", dumped).operations
    entry = dumped[2]["entries"][0]
    first_life = [{**entry, "collective_seq_id": entry["collective_seq_id"] + at, "record_id": at} for at in (500, 501)]
    dumped[2]["entries"] = [*first_life, *dumped[2]["entries"]]
    found = read(tmp_path / "two lives", dumped)
    assert found.operations.equals(expected)
    assert "sequence numbers of a group start again" in found.notes[0]


def test_no_damage_of_a_pickle_gets_past_the_reader(tmp_path):
    """Bytes of a real pickle changed at random: read, or a problem of that rank; never an error of another kind."""
    chance = np.random.default_rng(0)
    write(tmp_path, content())
    whole = (tmp_path / "nccl_trace_rank_3").read_bytes()
    for _ in range(600):
        damaged = bytearray(whole)
        for at in chance.integers(0, len(whole), 3):
            damaged[at] = chance.integers(0, 256)
        (tmp_path / "nccl_trace_rank_3").write_bytes(damaged)
        with contextlib.suppress(flight_recorder_entries.UnreadableError):
            flight_recorder_entries.read_dump(tmp_path / "nccl_trace_rank_3")


@pytest.mark.parametrize("name", ["nccl_trace_rank_1.json.gz", "nccl_trace_rank_1.json.1758580155"])
def test_a_dump_that_was_packed_or_stamped_is_read(tmp_path, name):
    """Left out, its rank would be said to be gone."""
    job = HangJob(1, 1, 2)
    write(tmp_path, dumps(job, [], run(job, [])), as_json=True)
    path = tmp_path / "nccl_trace_rank_1.json"
    content = path.read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    path.unlink()
    record = read_flight_records(tmp_path)
    assert {rank: dump.problem for rank, dump in record.dumps.items()} == {0: None, 1: None}


def test_a_packed_file_that_is_torn_is_evidence(tmp_path):
    job = HangJob(1, 1, 2)
    write(tmp_path, dumps(job, [], run(job, [])), as_json=True)
    path = tmp_path / "nccl_trace_rank_1.json"
    (tmp_path / "nccl_trace_rank_1.json.gz").write_bytes(gzip.compress(path.read_bytes())[:-20])
    path.unlink()
    assert "torn or damaged" in str(read_flight_records(tmp_path).dumps[1].problem)


def of_tensor_group(dumped, rank=4):
    """The unfinished calls of a rank in its tensor-parallel group."""
    return [entry for entry in dumped[rank]["entries"] if entry["process_group"][1].startswith("TENSOR")]


def test_an_impossible_value_of_an_entry_is_named(tmp_path):
    for change, words in (
        ({"is_p2p": True}, "is_p2p is True in 'nccl:_all_gather_base'"),
        ({"is_p2p": 5}, "is_p2p is 5"),
        ({"state": "odd"}, "state is 'odd'"),
        ({"time_discovered_started_ns": 5}, "time_discovered_started_ns is 5 and state scheduled"),
        ({"time_discovered_completed_ns": "x"}, "time_discovered_completed_ns is 'x' and state scheduled"),
        ({"process_group": 7}, "process_group is 7"),
        ({"pg_id": -1}, "pg_id is -1"),
        ({"record_id": 70001.5}, "record_id is 70001.5"),
        ({"input_sizes": 7}, "input_sizes is 7, not compared"),
        ({"time_created_ns": 1 << 62}, "times of unfinished entries contradict their record_id"),
    ):
        with case(change):
            dumped = content()
            of_tensor_group(dumped)[0].update(change)
            (note,) = (note for note in read(tmp_path, dumped).notes if "nccl_trace_rank_4" in note)
            assert words in note
            assert ("rank 4 is not accused" in note) == ("not compared" not in words)


def test_entries_that_contradict_each_other_are_named(tmp_path):
    def doubled(entries):
        entries.append({**entries[-1], "time_created_ns": entries[-1]["time_created_ns"] + 1})

    def repeated(entries):
        entries.append({**entries[-1], "record_id": entries[-1]["record_id"] + 1})

    def behind(entries):
        entry = entries[0]
        entries[:] = [
            {**entry, "record_id": number, "collective_seq_id": sequence}
            for number, sequence in enumerate((5, 1000, 1001, 1002))
        ]

    def without_group(entries):
        entries.insert(0, {**entries[0], "record_id": 1, "state": "completed", "pg_id": None})

    for change, words in (
        (lambda entries: entries.append(7), "entry None: not a table of values"),
        (doubled, "another entry has the same record_id"),
        (repeated, "entries repeat a sequence number"),
        (behind, "collective_seq_id is 5, which its neighbours do not allow"),
        (without_group, "pg_id is None; rank 4 is not accused: what is left out may be the last that it did"),
    ):
        with case(words):
            dumped = content()
            change(dumped[4]["entries"])
            (note,) = read(tmp_path, dumped).notes
            assert words in note


def test_numbers_as_floats_and_groups_by_name_alone_are_read_as_others(tmp_path):
    dumped = content()
    for entry in dumped[4]["entries"]:
        entry["record_id"] = float(entry["record_id"])
        entry["process_group"] = entry["process_group"][0]
    found, expected = read(tmp_path / "floats", dumped), read(tmp_path / "plain", content())
    assert found.notes == ()
    assert found.operations.equals(expected.operations)


def test_a_damaged_status_is_named_and_no_evidence(tmp_path):
    for status, words in (
        ([1], "pg_status is not used: "),
        ({"x": {}}, "pg_status is not used: 'x' is no number of a group"),
        ({"0": 7}, "pg_status is not used: a status is 7"),
        ({"0": {"last_enqueued_collective": "y"}}, "pg_status is not used: last_enqueued_collective is 'y'"),
    ):
        with case(status):
            dumped = content()
            dumped[4]["pg_status"] = status
            record = read(tmp_path, dumped)
            (note,) = record.notes
            assert words in note
            assert note.endswith("rank 4 is not accused: its pg_status is damaged")
            assert set(record.statuses["rank"]) == {0, 1, 2, 3, 5, 6, 7}


def test_a_newer_version_is_read_and_said(tmp_path):
    dumped = content()
    dumped[1]["version"] = "2.11"
    assert read(tmp_path, dumped).notes == ("nccl_trace_rank_1 has version 2.11, newer than the known 2.10",)


def test_groups_without_members_are_those_who_use_their_name(tmp_path):
    """gloo's recorder lists no ranks."""
    dumped = content()
    for dump in dumped.values():
        for group in dump["pg_config"].values():
            group["ranks"] = "[]"
    record = read(tmp_path, dumped)
    assert {(group.description, group.ranks) for group in record.groups} >= {("TENSOR_MODEL_PARALLEL_GROUP", (0, 1))}


def test_a_list_that_one_dump_cuts_is_the_list_that_another_states(tmp_path):
    dumped = content()
    expected = read(tmp_path / "whole", content())
    for group in dumped[6]["pg_config"].values():
        if group["desc"] == "default_pg":
            group["ranks"] = "[0, 1, 2, ...]"
    record = read(tmp_path / "cut", dumped)
    assert record.groups == expected.groups
    assert record.operations.equals(expected.operations)


def test_of_the_finished_operations_the_newest_are_evidence(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "FINISHED_KEPT", 2)
    dumped = content((1, 1, 2), [Fault("host", 1, 6)])
    last = dumped[0]["entries"][-1]
    dumped[0]["entries"] = [
        {**last, "record_id": number, "collective_seq_id": number, "state": state}
        for number, state in enumerate(["completed"] * 5 + ["scheduled"])
    ]
    assert read(tmp_path, dumped).operations.filter(rank=0)["sequence"].to_list() == [3, 4, 5]


def test_collectives_that_are_called_at_once_are_one_operation(tmp_path):
    """Two all-gathers and what closes them, which alone has a state."""
    dumped = content((1, 1, 2), [Fault("host", 1, 6)])
    entry = dumped[0]["entries"][-1]
    dumped[0]["entries"] = [
        {**entry, "record_id": number, "profiling_name": f"nccl:{name}", "state": state}
        for number, (name, state) in enumerate(
            (("_all_gather_base", "scheduled"), ("_all_gather_base", "scheduled"), ("coalesced", "completed"))
        )
    ]
    operations = read(tmp_path, dumped).operations.filter(rank=0)
    assert operations.select("name", "progress").rows() == [("_all_gather_base", 2)]


def test_the_line_of_the_program_stands_with_a_call(tmp_path):
    dumped = content((1, 1, 2), [Fault("host", 1, 6)])
    frames = [
        7,
        {"filename": "/usr/lib/python3/site-packages/torch/distributed/c10d.py", "line": 3, "name": "all_reduce"},
        {"filename": "train.py", "line": 9, "name": "step"},
        {"filename": "main.py", "line": 1, "name": "main"},
    ]
    dumped[0]["entries"][0]["frames"] = frames
    dumped[0]["entries"][1]["frames"] = frames[:2]
    sites = read(tmp_path, dumped).operations.filter(rank=0)["call_site"]
    assert sites.head(2).to_list() == ["train.py:9 step", None]


def test_a_dump_of_a_rank_that_the_job_does_not_have_is_refused(tmp_path):
    write(tmp_path, content())
    write(tmp_path, {9: {"version": "2.9", "entries": []}})
    with pytest.raises(FormatError, match="nccl_trace_rank_9 is a dump of rank 9, but the job has 8 ranks"):
        read_flight_records(tmp_path)


def test_a_file_that_is_no_dump_of_a_rank_says_why(tmp_path, monkeypatch):
    write(tmp_path, content())
    write(tmp_path, {3: {"version": "2.9", "entries": {}}, 4: {"version": "2.9", "tracekit": {"rank": "four"}}})
    (tmp_path / "nccl_trace_rank_5").write_bytes(gzip.compress(bytes(1 << 20)))
    monkeypatch.setattr(flight_recorder_entries, "LARGEST_FILE", 1 << 19)
    record = read_flight_records(tmp_path)
    assert record.dumps[3].problem == "is not a flight-recorder dump: its entries are not a list"
    assert str(record.dumps[4].problem).startswith("has no rank in its name; rename it to end in the rank")
    assert record.dumps[5].problem == "unpacks to more than 0.0 GB, the limit for a dump"


def test_a_limit_of_the_process_stays_below_that_of_a_dump():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with flight_recorder_entries.bounded_memory():
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        lower = limit - (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    try:
        with flight_recorder_entries.bounded_memory():
            assert resource.getrlimit(resource.RLIMIT_AS)[0] == lower
        assert resource.getrlimit(resource.RLIMIT_AS)[0] == lower
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
