"""A job analysed in batches of steps gives the bytes of the job analysed in one piece."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.attribution.test_exact_attribution import specs
from tests.analysis.replay.test_step_overlap import DataParallel, Pipeline
from tests.fleet.buckets import upload
from tests.handmade import LAYOUT, little_space, published_columns, run, run_process, slow_trace, write_canonical
from tests.properties import examples
from tests.test_op_trace import OPS
from tracekit.analysis.job.job import ReportOptions
from tracekit.base.errors import OutputError, SelectionError, TraceError
from tracekit.dashboards.documents.page import worst_steps
from tracekit.fleet.batches import JobFile, analysed_in_batches
from tracekit.fleet.executors import work
from tracekit.sources.load import load
from tracekit.store import Incoming, Store
from tracekit.synth import synthesize
from tracekit.trace.canonical import METADATA_KEY
from tracekit.trace.op import OpTrace

SAMPLES = Path(__file__).parents[2] / "sample_traces"


class InTurn:
    """Runs every task in this process, and the first of each round twice."""

    def run(self, tasks, *, alone=False):  # noqa: ARG002 - the interface of executors
        work(tasks[0])
        yield from map(work, tasks)


@pytest.fixture
def without_processes(monkeypatch):
    """The command's batches are analysed here: `test_the_command_prints_the_same_with_either_engine` has processes."""
    monkeypatch.setattr("tracekit.fleet.executors.LocalExecutor", lambda *_: InTurn())


def analysis_in_batches(path, executor=None, layout=None, asked=None, **settings):
    options = ReportOptions(**(asked or {}))
    return analysed_in_batches(JobFile(path, layout), executor or InTurn(), options=options, **settings)


def in_batches(path, *arguments, **settings):
    return analysis_in_batches(path, *arguments, **settings).report


@given(specs(), st.data())
@examples(8)
def test_batches_of_any_size_give_the_bytes_of_one_piece(tmp_path_factory, spec, data):
    path = tmp_path_factory.mktemp("drawn") / "job.parquet"
    trace = synthesize(spec)
    trace.write_parquet(path)
    size = data.draw(st.integers(1, trace.ops.height))
    assert in_batches(path, batch_ops=size).to_json() == load(path).report.to_json()


@pytest.mark.slow
def test_every_size_of_the_hand_made_job(tmp_path):
    trace = slow_trace(range(5))
    trace.write_parquet(tmp_path / "job.parquet")
    expected = load(tmp_path / "job.parquet").report.to_json()
    for steps in range(1, 6):
        assert in_batches(tmp_path / "job.parquet", batch_ops=steps * trace.ops.height // 5).to_json() == expected


def test_a_published_file_whose_rows_are_shuffled(tmp_path):
    trace = slow_trace(range(4))
    published_columns(trace.ops.sample(fraction=1, shuffle=True, seed=1)).write_parquet(tmp_path / "job.parquet")
    layout = tmp_path / "meta.yaml"
    layout.write_text("dp_size: 2\npp_size: 2\nworld_size: 4\n")
    found = in_batches(tmp_path / "job.parquet", layout=layout, batch_ops=1)
    assert found.to_json() == load(tmp_path / "job.parquet", layout=layout).report.to_json()


def test_causes_may_follow_from_fewer_steps_than_figures(tmp_path):
    slow_trace(range(9)).write_parquet(tmp_path / "job.parquet")
    whole = load(tmp_path / "job.parquet").report
    found = in_batches(tmp_path / "job.parquet", evidence_ops=whole.job.ops // 3)
    assert (found.job.evidence_steps, found.job.steps, found.job.ops) == (3, 9, whole.job.ops)
    assert (found.slowdown, found.by_worker) == (whole.slowdown, whole.by_worker)
    assert "3 of 9 steps" in {remark.name: remark.words for remark in found.remarks}["Causes"]
    shown = json.loads(found.to_json())
    assert shown["job"]["evidence_steps"] == 3
    known = [step["step"] for step in shown["by_step"] if step["lost_s"] is not None]
    assert known == [0, 4, 8]
    assert shown["slowdown"] == whole.slowdown


@pytest.mark.slow
def test_batches_of_which_one_dies_in_every_round_are_analysed_again(tmp_path):
    slow_trace(range(4)).write_parquet(tmp_path / "job.parquet")

    class Killing(InTurn):
        def run(self, tasks, *, alone=False):
            for count, done in enumerate(super().run(tasks, alone=alone)):
                yield type(done)(done.url, died=True, reason="killed") if count == 0 and not alone else done

    found = in_batches(tmp_path / "job.parquet", Killing(), batch_ops=1)
    assert found.to_json() == load(tmp_path / "job.parquet").report.to_json()


@pytest.mark.slow
def test_a_batch_that_always_dies_ends_the_analysis(tmp_path):
    slow_trace(range(2)).write_parquet(tmp_path / "job.parquet")

    class Dying(InTurn):
        def run(self, tasks, *, alone=False):
            for done in super().run(tasks, alone=alone):
                yield type(done)(done.url, died=True, reason="its analysis was killed by SIGKILL")

    with pytest.raises(TraceError, match=r"steps 0 to 0: its analysis was killed by SIGKILL, 3 times$"):
        in_batches(tmp_path / "job.parquet", Dying(), batch_ops=1)


def test_an_exception_in_a_process_is_one_error_with_its_cause(tmp_path, monkeypatch):
    """Whatever replays a batch raises, as a defect would."""
    slow_trace(range(3)).write_parquet(tmp_path / "job.parquet")
    monkeypatch.setattr("tracekit.fleet.batches.place_lanes", lambda *_: {}["nowhere"])
    words = "job.parquet: steps 0 to 0: the analysis ended with KeyError: 'nowhere'"
    with pytest.raises(TraceError, match=f"{words}$"):
        in_batches(tmp_path / "job.parquet", batch_ops=1)


def test_an_error_in_a_batch_is_that_of_one_piece(tmp_path):
    ops = slow_trace(range(3)).ops.with_columns(
        duration=pl.when((pl.col("step") == 2) & (pl.col("seq") == 1)).then(-1.0).otherwise("duration")
    )
    path = write_canonical(tmp_path / "job.parquet", ops)
    with pytest.raises(TraceError, match="expected 0 or more"):
        in_batches(path, batch_ops=1)


def test_rows_that_an_error_names_are_said_to_be_counted_in_some_steps(tmp_path):
    """Of the last step, the second half of the rows repeats the first."""
    ops = slow_trace(range(9)).ops
    path = write_canonical(tmp_path / "job.parquet", pl.concat([ops, ops.filter(step=8)]))
    with pytest.raises(TraceError, match=r"rows 0 and \d+ .*\(rows are counted in steps 8 to 8 alone\)"):
        in_batches(path, batch_ops=1)


def test_steps_that_cannot_be_told_or_are_all_left_out_are_one_error(tmp_path):
    ops = slow_trace(range(3)).ops
    path = write_canonical(tmp_path / "job.parquet", ops)
    for ignored, left in (((0, 1, 2), 0), ((7,), 3)):
        with pytest.raises(SelectionError, match=f"--ignore-steps leaves {left} of 3 steps, 0 to 2"):
            in_batches(path, ignored=ignored)
    assert in_batches(path, ignored=(0, 7)).job.steps == 2
    write_canonical(path, ops.with_columns(step=pl.when(pl.int_range(pl.len()) == 5).then(None).otherwise("step")))
    with pytest.raises(TraceError, match="ops without a step; drop or repair these rows"):
        in_batches(path)


def test_a_worker_of_another_rank_in_another_batch_is_one_error(tmp_path):
    ops, layout = slow_trace(range(6)).ops, LAYOUT.to_dict() | {"tp": 4, "world_size": 16}
    moved = (pl.col("step") == 4) & (pl.col("rank") == 3)
    ops = ops.with_columns(rank=pl.when(moved).then(9).otherwise("rank"))
    path = write_canonical(tmp_path / "job.parquet", ops, layout)
    with pytest.raises(TraceError, match=r"worker \(1,1\) has rank 9 in some steps only"):
        in_batches(path, batch_ops=1, evidence_ops=1)


def test_a_file_without_rows_is_said_as_in_one_piece(tmp_path):
    path = write_canonical(tmp_path / "job.parquet", slow_trace().ops.clear())
    one, many = (run("whatif", path, "--engine", engine) for engine in ("local", "processes"))
    assert (one.code, many) == (2, one)


def test_a_full_disk_is_one_error(tmp_path):
    slow_trace(range(2)).write_parquet(tmp_path / "job.parquet")
    with little_space(1000), pytest.raises(OutputError, match=r"File too large; set TMPDIR to a folder with more"):
        in_batches(tmp_path / "job.parquet", batch_ops=1)


@pytest.mark.slow
def test_the_command_prints_the_same_with_either_engine(tmp_path):
    slow_trace(range(2)).write_parquet(tmp_path / "job.parquet")
    same_with_either_engine(tmp_path / "job.parquet")


def same_with_either_engine(*words):
    one, many = (run("whatif", *words, "--engine", engine, "--json") for engine in ("local", "processes"))
    assert (many.code, many) == (0, one)


@pytest.mark.parametrize("options", [
    ("--fix", "worker=1,0", "--by", "stage"),
    ("--ignore-steps", "1", "--redact"),
    ("--gpu", "H100 on dp_rank=0", "--gpu-from", "H200"),
])  # fmt: skip
def test_options_print_the_same_with_either_engine(options, tmp_path, without_processes):
    slow_trace(range(3)).write_parquet(tmp_path / "job.parquet")
    same_with_either_engine(tmp_path / "job.parquet", *options)


@pytest.mark.slow
def test_the_only_trace_in_a_folder_and_a_window_of_a_job_in_a_store(tmp_path, without_processes):
    (tmp_path / "traces").mkdir()
    slow_trace(range(3)).write_parquet(tmp_path / "traces" / "job.parquet")
    store = Store(tmp_path / "store")
    for steps in (range(3), range(3, 5)):
        store.append(Incoming(slow_trace(steps), "job", "by hand"))
    for named in ((tmp_path / "traces",), ("--store", store.path), ("--store", store.path, "--window", "0")):
        same_with_either_engine(*named)


@pytest.mark.fleet
def test_a_job_of_a_store_in_object_storage_that_throttles(tmp_path, throttled_s3):
    Store(tmp_path / "store").append(Incoming(slow_trace(range(3)), "job", "by hand"))
    upload(tmp_path / "store", f"{throttled_s3}://jobs/store")
    one, many = (run("whatif", "--store", f"{throttled_s3}://jobs/store", "--engine", engine, "--json")
                 for engine in ("local", "processes"))  # fmt: skip
    assert (many.code, many) == (0, one)


def test_only_pipelines_are_analysed_in_batches(tmp_path):
    (tmp_path / "job.json").write_text("{}")
    Store(tmp_path / "store").append(Incoming(OpTrace(OPS, "ops"), "ops", "by hand"))
    for named in ((tmp_path / "job.json",), ("--store", tmp_path / "store", "--job", "ops")):
        done = run("whatif", *named, "--engine", "processes")
        assert (done.code, done.message) == (
            2,
            "tracekit: --engine processes is for a pipeline in one Parquet file or stored window; leave it out",
        )
    missing = [run("whatif", tmp_path / "no.parquet", "--engine", engine).message for engine in ("local", "processes")]
    assert missing == [f"tracekit: {tmp_path / 'no.parquet'}: no such file or folder"] * 2


def test_a_job_that_needs_more_memory_than_is_free_is_analysed_in_batches(tmp_path, monkeypatch, without_processes):
    slow_trace(range(2)).write_parquet(tmp_path / "job.parquet")
    expected = json.loads(run("whatif", tmp_path / "job.parquet", "--json").out)
    Store(tmp_path / "store").append(Incoming(slow_trace(range(2)), "slow job", "by hand"))
    monkeypatch.setattr("tracekit.commands.whatif._free_bytes", lambda: 1000)
    for named in ((tmp_path / "job.parquet",), ("--store", tmp_path / "store", "--job", "slow job")):
        done = run("whatif", *named, "--json")
        report = json.loads(done.out)
        assert ("run" in report) == ("--store" in named)
        assert (done.code, {key: report[key] for key in report if key != "run"}) == (0, expected)
        assert "in batches of steps, as with --engine processes" in done.message


@pytest.mark.fleet
def test_ray_prints_the_same_as_one_piece(tmp_path):
    slow_trace(range(3)).write_parquet(tmp_path / "job.parquet")
    one, many = (run_process("whatif", tmp_path / "job.parquet", "--engine", engine, "--json")
                 for engine in ("local", "ray"))  # fmt: skip
    assert (many.code, many.out) == (0, one.out)


def test_the_page_shows_the_slowest_of_the_steps_that_causes_follow_from(tmp_path):
    slow_trace(range(9)).write_parquet(tmp_path / "job.parquet")
    found = analysis_in_batches(tmp_path / "job.parquet", evidence_ops=300)
    assert found.lanes is not None
    steps = found.lanes.replay.graph.steps.tolist()
    assert {step["step"] for step in worst_steps(found.report, found.lanes)["steps"]} <= set(steps)


def test_what_only_one_piece_can_tell_is_refused(tmp_path):
    one_clock = pl.col("start") + 1.7e9 + 20 * pl.col("step")
    path = write_canonical(tmp_path / "job.parquet", slow_trace(range(5)).ops.with_columns(start=one_clock))
    assert load(path).report.job.steps == 5
    with pytest.raises(SelectionError, match=r"starts count from one clock.*--engine local"):
        in_batches(path, batch_ops=1)


def test_one_step_that_begins_early(tmp_path):
    early = pl.col("start") - pl.when(pl.col("step") == 4).then(0.25).otherwise(0.0)
    path = write_canonical(tmp_path / "job.parquet", slow_trace(range(5)).ops.with_columns(start=early))
    assert in_batches(path, batch_ops=1).to_json() == load(path).report.to_json()


@pytest.mark.slow
def test_members_of_collectives_that_were_not_recorded(tmp_path):
    lost = pl.col("step").is_in([2, 4]) & (pl.col("rank") == 1) & (pl.col("kind") == "grads-reduce-scatter")
    path = write_canonical(tmp_path / "job.parquet", slow_trace(range(6)).ops.filter(~lost))
    job = load(path)
    assert [gap.steps for gap in job.attribution.gaps] == [(2, 4)]
    assert job.attribution.slowdown_as_recorded is not None
    for size in (1, 200):
        assert in_batches(path, batch_ops=size).to_json() == job.report.to_json()


@pytest.mark.slow
def test_a_clock_that_drifts(tmp_path):
    ahead = pl.when(pl.col("rank") == 3).then(1 + pl.col("step") / 4).otherwise(0.0)
    path = write_canonical(
        tmp_path / "job.parquet", slow_trace(range(6)).ops.with_columns(start=pl.col("start") + ahead)
    )
    expected = load(path)
    assert expected.replay.clocks.moves
    assert in_batches(path, batch_ops=1).to_json() == expected.report.to_json()


@pytest.mark.slow
def test_a_lane_without_a_stage_is_left_out_alike(tmp_path):
    lost = (pl.col("step") == 3) & (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1)
    path = write_canonical(tmp_path / "job.parquet", slow_trace(range(6)).ops.filter(~lost))
    expected = load(path).report
    assert expected.to_dict()["coverage"]["dropped"] == [{"step": 3, "dp_rank": 1}]
    assert in_batches(path, batch_ops=1).to_json() == expected.to_json()


def test_a_step_without_a_stage_needs_one_piece(tmp_path):
    lost = (pl.col("step") == 3) & (pl.col("pp_rank") == 1)
    path = write_canonical(tmp_path / "job.parquet", slow_trace(range(6)).ops.filter(~lost))
    with pytest.raises(SelectionError, match=r"job\.parquet: .*no op of pp_rank 1.*--engine local$"):
        in_batches(path, batch_ops=1)


@pytest.mark.slow
def test_transfers_that_nobody_recorded(tmp_path):
    """Each is as fast as its link usually is, in all steps of the job."""
    late = pl.when(pl.col("kind") == "forward-compute").then(pl.col("seq") * (pl.col("step") % 4) / 100).otherwise(0.0)
    ops = slow_trace(range(6)).ops.with_columns(start=pl.col("start") + late)
    transfers = pl.col("kind").cast(pl.String).str.contains("send|recv")
    path = write_canonical(tmp_path / "job.parquet", ops.filter(~transfers))
    assert in_batches(path, batch_ops=1).to_json() == load(path).report.to_json()


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "statistics"), [(1000, True), (1000, False), (1, True)])
def test_row_groups_of_any_size(tmp_path, rows, statistics):
    trace = slow_trace(range(3))
    trace.write_parquet(tmp_path / "job.parquet")
    header = {METADATA_KEY: pq.read_metadata(tmp_path / "job.parquet").metadata[METADATA_KEY.encode()]}
    shuffled = pq.read_table(tmp_path / "job.parquet").take(np.random.default_rng(1).permutation(trace.ops.height))
    pq.write_table(
        shuffled.replace_schema_metadata(header),
        tmp_path / "other.parquet",
        row_group_size=rows,
        write_statistics=statistics,
    )
    found = in_batches(tmp_path / "other.parquet", batch_ops=1)
    assert found.to_json() == load(tmp_path / "job.parquet").report.to_json()


PIPELINE, DATA_PARALLEL = Pipeline(data=(0.1, 3.0)), DataParallel((4.0, 3.0), optimizer=(0.0, 2.0), pause_s=0.5)


@pytest.mark.parametrize(
    ("job", "looked_at", "steps"),
    [
        pytest.param(PIPELINE, 4, 1, marks=pytest.mark.slow),
        pytest.param(PIPELINE, 12, 5, marks=pytest.mark.slow),
        (DATA_PARALLEL, 4, 5),
        pytest.param(DATA_PARALLEL, 12, 1, marks=pytest.mark.slow),
    ],
)
def test_workers_that_begin_steps_early(tmp_path, monkeypatch, job, looked_at, steps):
    """Whichever steps of the job show when workers begin in a scenario, all batches begin them then."""
    monkeypatch.setattr("tracekit.analysis.replay.engine.MOST_STEPS", looked_at)
    trace, _ = job.played()
    uneven = trace.ops.with_columns(duration=pl.col("duration") * (1 + pl.col("step") * 3 % 5 / 50))
    path = write_canonical(tmp_path / "job.parquet", uneven, trace.layout.to_dict())
    expected = load(path)
    assert expected.replay.graph.begins_early
    found = in_batches(path, batch_ops=steps * trace.ops.height // 12)
    assert found.to_json() == expected.report.to_json()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["collected", "collected_healthy"])
def test_what_collect_recorded(name):
    """Workers begin early, and two of the steps have checkpoints that the others lack."""
    path = SAMPLES / f"{name}.parquet"
    assert in_batches(path, batch_ops=600).to_json() == load(path).report.to_json()


def test_steps_that_lack_a_dp_rank_are_left_out_alike(tmp_path):
    ops = slow_trace(range(6)).ops.filter((pl.col("step") != 1) | (pl.col("dp_rank") == 0))
    path = write_canonical(tmp_path / "job.parquet", ops)
    expected = load(path).report
    assert expected.to_dict()["coverage"]["left_out_steps"] == [1]
    assert in_batches(path, batch_ops=1).to_json() == expected.to_json()
    lacks_most = (pl.col("step") == 4) | (pl.col("dp_rank") == 0)
    with pytest.raises(SelectionError, match="DP ranks are missing from some steps"):
        in_batches(write_canonical(path, slow_trace(range(5)).ops.filter(lacks_most)), batch_ops=1)


def test_steps_whose_recording_was_cut_are_left_out_alike(tmp_path):
    cut = (pl.col("step") == 5) & (pl.col("kind") == "backward-compute") & (pl.col("seq") == 1)
    path = write_canonical(tmp_path / "job.parquet", slow_trace(range(6)).ops.filter(~cut))
    expected = load(path).report
    assert expected.to_dict()["coverage"]["left_out_steps"] == [5]
    assert in_batches(path, batch_ops=1).to_json() == expected.to_json()
