"""Dumps of flight recorders: what is read, what is evidence, what is refused."""

import contextlib
import gzip
import json
import pickle
import struct

import numpy as np
import pytest

from judges.hangsim import Fault, HangJob, dumps, run, write
from tracekit.base.errors import FormatError
from tracekit.collectors.importers import flight_recorder_entries
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


@pytest.mark.parametrize("lost", [9, 10, 11, 27])
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
    with pytest.raises(FormatError, match="dumps of different jobs"):
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
