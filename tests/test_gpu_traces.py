"""`tracekit whatif` on traces of torch.profiler, as people use it."""

import gzip
import json
import pickle
import re
import runpy
import shutil
import sys
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.handmade import run
from tests.kineto_files import GEMM, document, event, kernel, launch, write
from tracekit.sources.load import load
from tracekit.store import Store

SAMPLE = Path(__file__).resolve().parents[1] / "sample_traces" / "gpu_slow_input"


def test_the_script_makes_the_same_sample(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make_gpu.py", str(tmp_path)])
    runpy.run_path(str(SAMPLE.parent / "make_gpu.py"), run_name="__main__")
    made = sorted(tmp_path.iterdir())
    assert [path.name for path in made] == [path.name for path in sorted(SAMPLE.iterdir())]
    assert all(path.read_bytes() == (SAMPLE / path.name).read_bytes() for path in made)


def test_a_job_without_its_host_threads_has_the_same_report():
    job = load(SAMPLE)
    lean = job.lean()
    assert (job.recording.host.is_empty(), lean.recording.host.is_empty()) == (False, True)
    assert lean.whatif().to_dict() == job.whatif().to_dict()


def test_one_gpu_that_waits_for_its_host_has_no_peers(tmp_path):
    """Two kernels of 5 us in 100 us: the GPU is idle for 90 % of the recording, and nothing recorded says why."""
    write(tmp_path / "t.json", document([kernel(GEMM, 0, 5), kernel(GEMM, 95, 5)], world=1))
    out = " ".join(run("whatif", tmp_path).out.split())
    assert "IDLE: the GPU is idle for 90% of the recording: the launches of the next ops are not recorded" in out
    assert not re.search(r"peers|no rank stands out|all ranks", out)
    busy = tmp_path / "busy"
    busy.mkdir()
    write(busy / "t.json", document([kernel(GEMM, 0, 50), kernel(GEMM, 50, 50)], world=1))
    assert "BALANCED: nothing costs 5% of the recording" in run("whatif", busy).out


def test_documents_of_a_recording_have_no_name_of_a_host_if_asked(tmp_path):
    ran = run("whatif", SAMPLE, "--redact", "--markdown", tmp_path / "a.md", "--html", tmp_path / "a.html", "--json")
    assert json.loads(ran.out)["answer"]["culprits"][0]["host"] == "host-1"
    for text in (ran.out, (tmp_path / "a.md").read_text(), (tmp_path / "a.html").read_text()):
        assert "rank 2 on host-1" in text
        assert "node-0" not in text
        assert "gpu_slow_input" not in text


def test_the_json_object_counts_collectives_and_prices_each_rank():
    content = json.loads(run("whatif", SAMPLE, "--json").out)
    assert content["collectives"]["matched"] == 6
    assert max(content["by_rank"], key=lambda row: row["slowdown"])["rank"] == 2


@pytest.mark.slow
def test_files_may_be_named_one_by_one_and_asked_about():
    files = sorted(SAMPLE.iterdir())
    ran = run("whatif", *files, "--json", "--fix", "rank=2 and kind=input", "--by", "rank,kind")
    content = json.loads(ran.out)
    (question,) = content["questions"]
    assert content["step_time_s"]["recorded"] - question["step_time_s"] == pytest.approx(question["saved_s"])
    assert question["saved_s"] > 0
    assert "saved per recording" in run("whatif", *files, "--fix", "rank=2 and kind=input").out
    assert "rank,kind" in {row["labels"] for row in content["by_label"]}
    assert tracekit.load(*files).whatif().to_dict()["by_rank"] == content["by_rank"]


def test_a_users_pattern_makes_kernels_communication(tmp_path):
    write(tmp_path / "t.json", document([kernel("ring_step", 0, 5), kernel(GEMM, 5, 5)], world=1))
    plain, stated = (
        json.loads(run("whatif", tmp_path, "--json", *options).out)["by_rank"][0]["communication_s"]
        for options in ((), ("--kernel-class", "communication=^ring_"))
    )
    assert (plain, stated) == (0, pytest.approx(5e-6))


def test_unknown_kernels_are_listed_by_time(tmp_path):
    write(
        tmp_path / "t.json", document([kernel("mystery", 0, 5), kernel("riddle", 5, 9), kernel(GEMM, 20, 5)], world=1)
    )
    listed = json.loads(run("whatif", tmp_path, "--json").out)["unknown_kernels"]
    assert [row["name"] for row in listed] == ["riddle", "mystery"]


def test_a_recording_kept_as_an_op_trace_has_the_same_rank_cause_and_price(tmp_path):
    """Its rules are named in the file, so that it replays as it did."""
    job = tracekit.load(SAMPLE)
    job.trace.write_parquet(tmp_path / "ops.parquet")
    before, again = job.whatif(), tracekit.load(tmp_path / "ops.parquet").whatif()
    assert again.slowdown == pytest.approx(before.slowdown)
    (found,), (was,) = again.findings, before.findings
    assert (found.kind, found.where, found.effect) == (was.kind, was.where, was.effect)
    assert found.saved_s == pytest.approx(was.saved_s)


def test_files_named_one_by_one_are_one_job_of_the_store(tmp_path):
    run("import", *sorted(SAMPLE.iterdir()), "--store", tmp_path / "jobs.store", "--name", "four")
    assert Store(tmp_path / "jobs.store").job_list()["world_size"].to_list() == [4]


def test_a_bad_folder_beside_a_good_one_stores_nothing(tmp_path):
    write(tmp_path / "bad" / "t.json", document([event("cpu_op", "aten::mm", 0, 5)]))
    ran = run("import", SAMPLE, tmp_path / "bad", "--store", tmp_path / "jobs.store")
    assert ran.code == 2
    assert "holds no GPU ops" in ran.err
    assert not (tmp_path / "jobs.store").exists()


def test_the_timeline_has_three_replays_of_every_rank_and_arrows_along_the_critical_path(tmp_path):
    job, path = tracekit.load(SAMPLE), tmp_path / "timeline.json.gz"
    slices = job.export(path).slices
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert set(names.values()) == {f"{replay}: rank {rank}" for replay in ("recorded", "replayed", "ideal")
                                   for rank in range(4)}  # fmt: skip
    drawn = [one for one in events if one["ph"] == "X"]
    assert len(drawn) == slices == 3 * job.trace.ops.height
    recorded = sorted(one["ts"] for one in drawn if names[one["pid"]].startswith("recorded"))
    assert recorded == pytest.approx(sorted(job.trace.ops["start"] * 1e6), abs=1e-3)
    # Every arrow leaves where its op ends, and goes to one that begins no earlier, or meets it.
    leaves, arrives = ({one["id"]: one["ts"] for one in events if one["ph"] == phase} for phase in ("s", "f"))
    assert leaves.keys() == arrives.keys()
    assert all(arrives[number] >= at - 1e-3 for number, at in leaves.items())
    assert max(arrives.values()) <= max(one["ts"] + one["dur"] for one in drawn) + 1e-3


def test_a_timeline_can_show_one_step_and_is_replaced_but_is_no_trace(tmp_path):
    path = tmp_path / "timeline.json.gz"
    whole, one = (run("store", "export", SAMPLE, "-o", path, *options) for options in ((), ("--steps", "6")))
    assert int(re.search("([0-9,]+) slices", one.out)[1].replace(",", "")) < int(
        re.search("([0-9,]+) slices", whole.out)[1].replace(",", "")
    )
    assert "a timeline that tracekit wrote, not a trace; open it in https://ui.perfetto.dev" in run("whatif", path).err
    assert "has none of these steps" in run("store", "export", SAMPLE, "-o", path, "--steps", "99").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "x.yaml"), "--layout is for pipeline traces"),
        (("--fix", "rank=77"), "'77' is not a rank of this job|matches no op"),
        (("--by", "colour"), "colour"),
        (("--kernel-class", "speed=x"), "'speed' is not a kernel class"),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments, message):
    ran = run("whatif", SAMPLE, *arguments)
    assert ran.code == 2
    assert re.search(message, ran.err)
    assert "Traceback" not in ran.err


def test_two_pipeline_traces_are_no_job():
    ran = run("whatif", SAMPLE.parent / "healthy.parquet", SAMPLE.parent / "slow_worker.parquet")
    assert ran.code == 2
    assert "2 traces: only files of torch.profiler can form one job together" in ran.err


def test_a_profile_of_the_cpu_alone_says_how_to_record(tmp_path):
    path = write(tmp_path / "t.json", document([event("cpu_op", "aten::mm", 0, 5)]))
    ran = run("whatif", path)
    assert ran.code == 2
    assert "holds no GPU ops" in ran.err
    assert "ProfilerActivity.CUDA" in ran.err


def test_a_damaged_file_among_others_is_left_out_of_nothing(tmp_path):
    """One rank's file is cut in half: the report says so, and stays one report."""
    shutil.copytree(SAMPLE, tmp_path / "job")
    victim = tmp_path / "job" / "rank1_trace.json.gz"
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    content = json.loads(run("whatif", tmp_path / "job", "--json").out)
    assert len(content["by_rank"]) == 4
    assert any("rank1_trace.json.gz" in reason for reason in content["trust"]["notes"])


@pytest.mark.parametrize(
    ("name", "write_it"), [("snapshot.pickle", pickle.dumps), ("snapshot.json", lambda one: json.dumps(one).encode())]
)
def test_a_memory_snapshot_says_what_it_is_and_what_to_do_alone_and_in_a_folder(tmp_path, name, write_it):
    path = tmp_path / name
    path.write_bytes(write_it({"segments": [{"address": 1, "blocks": []}], "device_traces": [[]]}))
    for given in (path, tmp_path):
        ran = run("whatif", given)
        assert ran.code == 2
        assert "a memory snapshot of torch.cuda.memory" in ran.err
        assert "record a trace with torch.profiler.profile" in ran.err
        assert run("import", given, "--store", tmp_path / "jobs.store").code == 2
    assert not (tmp_path / "jobs.store").exists()


ACTIONS = ("PP:2F0", "PP:2SEND_F0", "PP:2I0", "PP:2W0", "PP:2RECV_F1", "PP:2F1", "PP:2B1", "PP:2UNSHARD", "optimizer")


def test_actions_of_a_pipeline_schedule_give_stage_microbatch_and_action(tmp_path):
    """Autograd launches the kernels of a backward from another thread than the one that runs the schedule."""
    events = []
    for at, name in enumerate(ACTIONS):
        begin, of_autograd = at * 100, name in {"PP:2I0", "PP:2W0", "PP:2B1"}
        events += [
            event("user_annotation", name, begin, 90),
            launch(begin + 10, at, tid=101 if of_autograd else 100),
            kernel(GEMM, begin + 20, 60, correlation=at),
        ]
    path = write(tmp_path / "t.json", document(events, world=1))
    ops = load(path).trace.ops.filter(pl.col("role") == "gpu").sort("start")
    assert ops.select("stage", "action", "microbatch").rows() == [
        (2, "forward", 0),
        (2, "forward-send", 0),
        (2, "backward-input", 0),
        (2, "backward-weight", 0),
        (2, "forward-recv", 1),
        (2, "forward", 1),
        (2, "backward", 1),
        (None, None, None),
        (None, None, None),
    ]
    report = json.loads(
        run("whatif", path, "--json", "--by", "stage,action", "--fix", "action=forward and microbatch=1").out
    )
    by = {row["value"] for row in report["by_label"] if row["labels"] == "stage,action"}
    assert {"2,forward", "2,backward-weight"} <= by
    assert report["questions"][0]["ops"] > 0


def test_a_recording_without_such_a_schedule_has_no_such_labels(tmp_path):
    path = write(tmp_path / "t.json", document([launch(0, 1), kernel(GEMM, 10, 50, correlation=1)], world=1))
    assert not {"stage", "microbatch", "action"} & set(load(path).trace.ops.columns)
