"""A recording that is over, of which one rank is garbage: it is left out in one line, and the others are read."""

import numpy as np
import pytest

from benchmarks.writtenrun import WrittenRun
from tests.cases import case
from tests.handmade import read_any, run
from tests.live.test_hostile_segments import GARBAGE, copy_last, put
from tracekit.base.errors import FormatError
from tracekit.collectors.record.wire_format import RECORD, Category
from tracekit.collectors.run_directory.follow import read_attempt
from tracekit.collectors.run_directory.segments import RECORD_DTYPE


@pytest.fixture
def written(tmp_path) -> WrittenRun:
    return WrittenRun(tmp_path / "run", 4, per_host=2)


def left_out(written):
    recording = read_attempt(written.directory, 0)
    assert sorted(recording.ranks) == [0, 2, 3]
    assert recording.missing_ranks == (1,)
    (line,) = recording.left_out
    assert line.startswith("rank 1 is left out: ")
    assert line.endswith("; the other ranks are read")
    return line


def test_a_record_that_cannot_be_leaves_its_rank_out(tmp_path):
    for name, change, said in GARBAGE:
        written = WrittenRun(tmp_path / name, 4, per_host=2)
        written.run(range(1, 11))
        copy_last(written, 1, put("category", Category.COMPUTE), change)
        written.run(range(11, 21))
        with case(name):
            assert said in left_out(written)


def test_bytes_that_cannot_be_read_leave_their_rank_out(written):
    written.run(range(1, 11))
    written.write(1, b"\xff" * RECORD.size)
    assert "has the unknown category 255" in left_out(written)


def test_facts_that_cannot_be_read_leave_their_rank_out_and_of_two_processes_the_first_counts(written):
    written.run(range(1, 11))
    written.tell(1, [("process", written._facts(1, 8)[0][1])])
    assert read_attempt(written.directory, 0).left_out == ()
    written.tell(1, [("group", 7)])
    assert "the fact 'group' is 7: expected `object`, got `int`" in left_out(written)


def test_ranks_of_another_job_are_left_out(written):
    written.tell(7, written._facts(7, 16))
    written.run(range(1, 11))
    recording = read_attempt(written.directory, 0)
    assert (sorted(recording.ranks), recording.world_size) == ([0, 1, 2, 3], 4)
    assert recording.left_out == (
        (
            "rank 7 is left out: it saw 16 ranks, the others 4: segments of two jobs in one folder; the other ranks are"
            " read"
        ),
    )


def test_a_fact_that_nothing_hangs_on_is_skipped(written):
    written.run(range(1, 11))
    written.tell(1, [("dropped", "many"), ("dropped", "more")])
    recording = read_attempt(written.directory, 0)
    assert sorted(recording.ranks) == [0, 1, 2, 3]
    (line,) = recording.left_out
    assert line.startswith("rank 1: ")
    assert line.endswith("expected `int`, got `str`; copy it again; facts like this are skipped")


def test_garbage_alone_is_an_error(tmp_path):
    written = WrittenRun(tmp_path / "run", 1)
    written.run(range(1, 11))
    written.write(0, b"\xff" * RECORD.size)
    with pytest.raises(FormatError, match="has the unknown category 255"):
        read_attempt(written.directory, 0)


def test_steps_that_the_recording_jumps_over_are_no_garbage(tmp_path):
    """Of one rank alone, which was attached to twice, for a step each."""
    written = WrittenRun(tmp_path / "run", 1)
    written.run([700, 9000])
    (rank,) = read_attempt(written.directory, 0).ranks.values()
    assert np.unique(rank.records["step"]).tolist() == [700, 9000]


def test_whatif_of_a_folder_says_which_rank_is_left_out_and_reads_the_rest(written):
    written.run(range(1, 21), slow={3: 2.0})
    whole = read_any(written.directory)
    records = np.frombuffer(written.segment(1).read_bytes()[32:], RECORD_DTYPE).copy()
    records["step"][-7] = 1 << 30
    written.segment(1).write_bytes(written.segment(1).read_bytes()[:32] + records.tobytes())
    ran = run("whatif", written.directory)
    assert ran.code == 0
    assert ran.err.startswith("tracekit: rank 1 is left out: garbage: its step went from 19 to 1073741824")
    assert "rank 3 on node-0001" in ran.out
    assert read_any(written.directory).steps.tolist() == whole.steps.tolist()
