"""The recorder: bounded, torn tails, sealing, switching itself off."""

import pytest

from tracekit.base.errors import FormatError
from tracekit.collectors.record.recorder import Recorder
from tracekit.collectors.record.wire_format import (
    HEADER,
    OPEN_SUFFIX,
    RECORD,
    Category,
    RuntimeOptions,
    segment_stem,
)
from tracekit.collectors.run_directory.follow import read_attempt
from tracekit.collectors.run_directory.launchers import write_manifest
from tracekit.collectors.run_directory.segments import records_in


def record(step: int) -> tuple[int, ...]:
    """A data-load of that step."""
    return (Category.DATA_LOAD, 0, 0, step, -1, -1, -1, 10 * step, 10 * step + 5, 0)


def attempt(tmp_path):
    """The folder of the first attempt."""
    directory = tmp_path / "attempt-000"
    directory.mkdir()
    return directory


def write(tmp_path, count: int, **options):
    """A recorder that wrote `count` records and was closed."""
    directory = attempt(tmp_path)
    recorder = Recorder(directory, 3, 0, RuntimeOptions(**options))
    recorder.fact("process", {"rank": 3, "world_size": 8, "host": "a", "time_ns": 0, "monotonic_ns": 0})
    recorder.fact("name", [0, "data-load"])
    for step in range(count):
        recorder.add(record(step))
    recorder.start()
    recorder.close({"dropped": recorder.dropped})
    return directory, recorder


def test_what_is_written_is_read(tmp_path):
    """Records, names and the summary come back, from sealed segments."""
    directory, _ = write(tmp_path, 5)
    write_manifest(directory)
    recording = read_attempt(tmp_path, 0).ranks[3]
    assert recording.records["step"].tolist() == [0, 1, 2, 3, 4]
    assert recording.names == {0: "data-load"}
    assert recording.summary == {"dropped": 0, "written": 5}
    assert [path.suffix for path in sorted(directory.glob("rank-*-*"))] == [".ops"]


def test_segments_roll_over(tmp_path):
    """A full segment is sealed and the next begun; a record costs under 100 bytes."""
    directory, _ = write(tmp_path, 25, records_per_segment=10)
    sizes = [path.stat().st_size for path in sorted(directory.glob("*.ops"))]
    assert sizes == [HEADER.size + count * RECORD.size for count in (10, 10, 5)]
    assert RECORD.size < 100
    assert read_attempt(tmp_path, 0).ranks[3].records["step"].tolist() == list(range(25))


def test_a_bounded_recording_keeps_the_newest_steps(tmp_path):
    """Five records a step into 8 segments of 9: the disk holds 72 records at most, and the torn step is not whole."""
    directory = attempt(tmp_path)
    keep = 8 * (HEADER.size + 9 * RECORD.size)
    recorder = Recorder(directory, 3, 0, RuntimeOptions(keep_bytes=keep))
    recorder.fact("process", {"rank": 3, "world_size": 8, "host": "a", "time_ns": 0, "monotonic_ns": 0})
    for step in range(100):
        for category in (Category.COMPUTE, Category.COMPUTE, Category.OPTIMIZER, Category.GC, Category.STEP):
            recorder.add((category, 0, 0, step, -1, -1, -1, 10 * step, 10 * step + 5, 0))
    recorder.start()
    recorder.close({})
    assert sum(path.stat().st_size for path in directory.glob("rank-*-*")) <= keep
    write_manifest(directory)
    records = read_attempt(tmp_path, 0).ranks[3].records
    ends = records[records["category"] == Category.STEP]["step"].tolist()
    kept = 500 % 9 + 7 * 9  # records: those of the open segment and of seven before
    assert len(records) == kept - 1  # less the end of the step that began before them
    assert ends == list(range(100 - kept // 5, 100))


def test_a_rank_whose_last_records_could_not_be_written_has_no_summary(tmp_path, monkeypatch):
    """A summary says that all before it is there; the writer sleeps till the end, when its file cannot be made."""
    monkeypatch.setattr(f"{Recorder.__module__}.FLUSH_INTERVAL_S", 60)
    directory = attempt(tmp_path)
    recorder = Recorder(directory, 3, 0, RuntimeOptions())
    recorder.start()
    (directory / f"{segment_stem(3, 0)}{OPEN_SUFFIX}").mkdir()
    recorder.add(record(0))
    recorder.close({"off": recorder.off})
    assert recorder.off is not None
    assert not any("summary" in path.read_text() for path in directory.glob("*.facts"))


def test_a_full_ring_drops_and_counts(tmp_path):
    """More records than the ring holds, before the writer runs: the rest is dropped, and said."""
    _, recorder = write(tmp_path, 30, ring_capacity=20)
    assert recorder.dropped == 10
    recording = read_attempt(tmp_path, 0).ranks[3]
    assert len(recording.records) == 20
    assert recording.summary == {"dropped": 10, "written": 20}
    assert recording.facts["dropped"] == [10]  # told while the run goes on, too


def test_a_torn_tail_costs_the_torn_record_only(tmp_path):
    """A segment cut anywhere gives its whole records."""
    directory, _ = write(tmp_path, 5)
    (segment,) = directory.glob("*.ops")
    content = segment.read_bytes()
    for cut in range(1, len(content) + 1):
        segment.write_bytes(content[:-cut])
        records = read_attempt(tmp_path, 0).ranks[3].records
        whole = max(5 * RECORD.size - cut, 0) // RECORD.size
        assert records["step"].tolist() == list(range(whole))


def test_another_file_is_no_segment(tmp_path):
    """A file with another head is an error that names it."""
    path = tmp_path / "rank-000000-00000000.ops"
    path.write_bytes(b"x" * 100)
    with pytest.raises(FormatError, match=r"rank-000000-00000000\.ops: not a segment"):
        records_in(path.read_bytes(), path)


def test_a_folder_that_vanishes_switches_the_recorder_off(tmp_path, capfd):
    """One warning; add goes on without effect."""
    directory = attempt(tmp_path)
    recorder = Recorder(directory, 3, 0, RuntimeOptions())
    directory.rmdir()
    recorder.add(record(0))
    recorder.start()
    recorder.close({})
    recorder.add(record(1))
    assert "FileNotFoundError" in recorder.off
    assert recorder.dropped == 1
    assert capfd.readouterr().err.count("rank 3 stopped recording, training continues") == 1
