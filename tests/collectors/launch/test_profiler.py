"""`tracekit collect --profiler`: torch.profiler on every rank of a real job, a file each."""

import gzip
import json
from pathlib import Path

import pytest

from tests.collectors.conftest import collect, forks
from tracekit.collectors.importers.kineto.rank_columns import read_file
from tracekit.collectors.launch.collect import _has_kernels

SAMPLE = Path(__file__).parents[3] / "sample_traces" / "gpu_slow_input" / "rank0_trace.json.gz"


@pytest.mark.slow
def test_every_rank_writes_the_steps_asked_for_into_a_file_of_its_own(tmp_path):
    folder = tmp_path / "profile"
    options = ("--steps", "2:", "--profiler", str(folder), "--profiler-steps", "2")
    collected = collect(tmp_path, forks(2, "quick.py"), *options, STEPS=6)
    assert collected.process.returncode == 0
    traces = sorted((folder / "attempt-000").iterdir())
    assert [path.name for path in traces] == ["rank0_trace.json.gz", "rank1_trace.json.gz"]
    for rank, path in enumerate(traces):
        document = json.loads(gzip.decompress(path.read_bytes()))
        assert (document["distributedInfo"]["rank"], document["distributedInfo"]["world_size"]) == (rank, 2)
        steps = {event["name"] for event in document["traceEvents"] if "ProfilerStep" in event["name"]}
        assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
        (read,) = read_file(path)
        assert read.host_events > 100
        assert read.notes == ()
    (line,) = collected.summary["profiles"]
    where = f"open those in {folder}/attempt-000 in ui.perfetto.dev"
    assert line == f"traces of torch.profiler, 2 ranks, without GPU ops: {where}"


def test_a_trace_with_kernels_is_told_from_one_without(tmp_path):
    without, torn = tmp_path / "without.json.gz", tmp_path / "torn.json.gz"
    without.write_bytes(gzip.compress(b'{"traceEvents": [{"cat": "cpu_op", "name": "a kernel"}]}'))
    torn.write_bytes(b"\x1f\x8b torn")
    assert _has_kernels(SAMPLE)
    assert not _has_kernels(without)
    assert not _has_kernels(torn)


def test_a_folder_that_holds_files_is_refused_before_the_command_runs(tmp_path):
    from tests.handmade import run

    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank0_trace.json.gz").touch()
    ran = run(
        "collect", "--no-store", "--out", tmp_path / "t.parquet", "--profiler", tmp_path / "profile", "--", "false"
    )
    assert ran.code == 2
    assert "not empty; choose an empty or new folder for --profiler" in ran.err
