"""`tracekit collect --profiler`: torch.profiler on every rank of a real job, a file each."""

import gzip
import json

from tests.collectors.conftest import collect, forks
from tracekit.collectors.importers.kineto.reading import read_file


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
    assert line == f"traces of torch.profiler, 2 ranks; next: tracekit whatif {folder}/attempt-000"


def test_a_folder_that_holds_files_is_refused_before_the_command_runs(tmp_path):
    from tests.handmade import run

    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank0_trace.json.gz").touch()
    ran = run(
        "collect", "--no-store", "--out", tmp_path / "t.parquet", "--profiler", tmp_path / "profile", "--", "false"
    )
    assert ran.code == 2
    assert "not empty; choose an empty or new folder for --profiler" in ran.err
