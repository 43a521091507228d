"""The door: what a trace must be, how it survives its file, and what its coverage is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracekit
from tests.cases import case
from tests.handmade import LAYOUT, OPS_PER_STEP, published_columns, slow_frame, slow_trace
from tests.properties import examples
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import LayoutError, SelectionError, TraceError, TracekitError
from tracekit.collectors.importers.published import read_published
from tracekit.trace import canonical
from tracekit.trace.canonical import RUN_QUEUE, Trace, read_parquet
from tracekit.trace.facts import gpu_uuids
from tracekit.trace.model import COMMUNICATION, KINDS, LARGEST_SIZE, LONGEST_S, Layout, OpKind, Worker, kind_groups
from tracekit.trace.schema import SCHEMA, Origin, _check_identity, step_positions

KEYS = ["step", "dp_rank", "pp_rank", "kind", "seq"]


def trace(ops: Any, layout: Layout = LAYOUT, **more: Any) -> Trace:
    return Trace.from_frame(ops, layout, name="job", **more)


# ---- what the door makes of a frame


def test_columns_come_out_in_canonical_order_and_types() -> None:
    ops = slow_frame().select(reversed(SCHEMA)).with_columns(pl.col("step", "rank").cast(pl.UInt8), extra=pl.lit(1))
    assert trace(ops).ops.schema == pl.Schema(SCHEMA)


def test_microbatch_and_chunk_can_be_left_out() -> None:
    checked = trace(slow_frame().drop("microbatch", "chunk")).ops
    assert checked.schema == pl.Schema(SCHEMA)
    assert checked["microbatch"].null_count() == checked["chunk"].null_count() == OPS_PER_STEP


def test_a_frame_of_pandas_gives_the_same_trace() -> None:
    """There, a missing value makes integers floats and text is an object."""
    ops = slow_frame()
    as_pandas = ops.with_columns(pl.col("kind").cast(pl.String)).to_pandas().astype({"microbatch": float})
    assert as_pandas["microbatch"].isna().any()
    assert trace(as_pandas).ops.equals(trace(ops).ops)


def test_what_is_no_frame_is_one_clear_error() -> None:
    for frame in ([1, 2], None, {"step": [1]}):
        with case(frame), pytest.raises(TraceError, match="not a frame of polars or pandas"):
            trace(frame)
    with pytest.raises(TraceError, match="a column, not a frame of polars or pandas"):
        trace(slow_frame().to_pandas()["step"])


def test_times_of_the_host_are_seconds_or_missing() -> None:
    for column in ("posted", "resumed"):
        with pytest.raises(
            TraceError, match=f"column '{column}' has type String; expected seconds; convert the column"
        ):
            trace(slow_frame().with_columns(pl.lit("soon").alias(column)))
        with pytest.raises(TraceError, match="expected finite seconds >= 0, or null"):
            trace(slow_frame().with_columns(pl.lit(-1.0).alias(column)))
        assert trace(slow_frame().with_columns(pl.lit(None).alias(column))).ops.height == OPS_PER_STEP


def test_the_frame_given_is_not_changed() -> None:
    ops = slow_frame().select(pl.col("step").cast(pl.Int64), pl.exclude("step"))
    before = ops.clone()
    trace(ops)
    assert ops.equals(before)
    assert ops.schema == before.schema


def test_metadata_and_step_starts_cannot_be_changed_afterwards() -> None:
    found = trace(slow_frame(), metadata={"a": 1}, step_starts={0: 1.0})
    for mapping in (found.metadata, found.step_starts):
        with pytest.raises(TypeError):
            mapping["a"] = 2  # type: ignore[index]


def test_times_are_below_what_a_clock_shows() -> None:
    for column in ("start", "duration"):
        longest, longer = (slow_frame().with_columns(pl.lit(LONGEST_S + more).alias(column)) for more in (0, 1))
        trace(longest, unit="s")
        with pytest.raises(TraceError, match=f"column '{column}', row 0: 100000001.0; expected seconds"):
            trace(longer, unit="s")


def test_a_start_slightly_before_the_step_is_fine() -> None:
    """Clocks of ranks differ, so an op can seem to start before its step."""
    assert trace(slow_frame().with_columns(pl.col("start") - 0.01)).ops["start"].min() == -0.01


def test_the_source_and_its_column_names_are_those_of_the_reader() -> None:
    ops = slow_frame().with_columns(duration=-1.0)
    with pytest.raises(TraceError, match=r"^my file: column 'took', row 0: -1.0; expected 0 or more$"):
        trace(ops, source="my file", columns={"duration": "took"})


def test_the_row_of_an_error_is_the_row_of_the_frame() -> None:
    ops = (
        slow_frame()
        .with_row_index("row")
        .with_columns(duration=pl.when(pl.col("row") == 31).then(-2.5).otherwise("duration"))
    )
    with pytest.raises(TraceError, match=r"row 31: -2\.5"):
        trace(ops)


@examples(10)
@given(seed=st.integers(0, 2**32), at=st.integers(0, 2 * OPS_PER_STEP - 1))
def test_one_op_too_many_or_too_few_is_found_wherever_it_is(seed: int, at: int) -> None:
    """Whichever op is doubled, the message names it; whichever op but the last of its kind is lost, seq has a gap."""
    ops = slow_frame((0, 7)).sample(fraction=1, shuffle=True, seed=seed)
    doubled = ops.row(at, named=True)
    with pytest.raises(TraceError) as caught:
        trace(pl.concat([ops, ops[at : at + 1]]))
    worker = f"{doubled['kind']} of worker ({doubled['dp_rank']},{doubled['pp_rank']}) in step {doubled['step']}"
    assert worker in str(caught.value)
    lost = (pl.col("kind") == "forward-compute") & (pl.col("seq") == 0) & (pl.col("rank") == doubled["rank"])
    with pytest.raises(TraceError, match="seq to run from 0 without gaps"):
        trace(ops.filter(~lost))


def test_sparse_traces_are_checked_too() -> None:
    """Few ops on workers far apart take another path through the check for duplicates."""
    layout = Layout(dp=2**18, pp=1)
    rows = {"step": range(30), "dp_rank": [0, 2**18 - 1] * 15, "kind": ["gc"] * 30, "seq": [0] * 30}
    ops = pl.DataFrame(
        {**rows, "pp_rank": [0] * 30, "rank": rows["dp_rank"], "start": [0.0] * 30, "duration": [1.0] * 30}
    )
    assert trace(ops, layout).ops.height == 30
    with pytest.raises(TraceError, match="rows 0 and 30 are the same op"):
        trace(pl.concat([ops, ops[:1]]), layout)


# ---- steps, workers, coverage


def test_coverage_counts_workers_and_worker_steps() -> None:
    """Steps 0 and 7 of 4 workers; (1,1) is never there, (0,0) misses step 7: 8 - 2 - 1 worker-steps."""
    never = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1)
    once = (pl.col("dp_rank") == 0) & (pl.col("pp_rank") == 0) & (pl.col("step") == 7)
    coverage = trace(slow_frame((0, 7)).filter(~never & ~once)).coverage()
    assert (coverage.workers_expected, coverage.workers_traced) == (4, 3)
    assert (coverage.worker_steps_expected, coverage.worker_steps_traced) == (8, 5)
    assert coverage.missing_workers == (Worker(1, 1),)
    assert not coverage.complete
    assert trace(slow_frame((0, 7))).coverage().complete


def test_coverage_counts_dp_ranks_that_were_never_traced() -> None:
    coverage = trace(slow_frame(), Layout(dp=3, pp=2)).coverage()
    assert (coverage.workers_expected, coverage.workers_traced, coverage.worker_steps_expected) == (6, 4, 6)
    assert coverage.missing_workers == (Worker(2, 0), Worker(2, 1))


def test_an_outline_has_one_op_of_each_worker_and_step_and_the_same_coverage() -> None:
    never = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1) & (pl.col("step") == 7)
    whole = trace(slow_frame((0, 7)).filter(~never).sort("step", "dp_rank", "pp_rank"))
    outline = whole.outline()
    assert outline.ops.height == 7
    assert outline.ops.select("step", "dp_rank", "pp_rank").is_unique().all()
    assert outline.coverage() == whole.coverage()
    assert outline.worker_ranks() == whole.worker_ranks()
    assert outline.steps.tolist() == [0, 7]


def test_an_outline_keeps_all_ops_where_they_say_who_waited() -> None:
    layout = Layout(dp=2, pp=2, tp=2)
    ops = slow_frame().with_columns(rank=2 * pl.col("rank"), waited=[0.0, 0.0])
    assert trace(ops, layout).outline().ops.height == ops.height


def test_coverage_with_dsp_takes_the_numbering_in_use() -> None:
    """With dsp, recorders number either dp or dp x dsp ranks; DP ranks below dp mean the former."""
    assert trace(slow_frame(), Layout(dp=2, pp=2, dsp=4)).coverage().workers_expected == 4
    beyond = slow_frame().with_columns(dp_rank=pl.col("dp_rank") * 7, rank=pl.col("dp_rank") * 2 + pl.col("pp_rank"))
    assert trace(beyond, Layout(dp=2, pp=2, dsp=4)).coverage().workers_expected == 16


def test_worker_ranks_are_the_recorded_ones() -> None:
    assert slow_trace().worker_ranks() == {Worker(0, 0): 0, Worker(0, 1): 2, Worker(1, 0): 1, Worker(1, 1): 3}


def test_steps_left_out_are_gone_and_at_least_one_stays() -> None:
    whole = slow_trace((2, 5, 9))
    assert whole.without_steps([5, 100]).steps.tolist() == [2, 9]
    assert whole.steps.tolist() == [2, 5, 9]
    with pytest.raises(SelectionError, match="every step is left out; the trace has steps 2 to 9"):
        whole.without_steps([2, 5, 9])
    with pytest.raises(SelectionError, match="none of the steps to leave out exists"):
        whole.without_steps([3])


BIT = st.integers(0, 1)
STREAMS = st.tuples(*[st.sampled_from([0, 1, 2**20])] * 2, BIT, st.sampled_from(KINDS[:2]))


@examples(80)
@given(st.data(), st.dictionaries(STREAMS, st.integers(1, 3), min_size=1, max_size=6))
def test_ops_in_any_order_are_refused_exactly_if_a_rank_or_a_seq_is_wrong(data, streams: dict[Any, int]) -> None:
    """Each worker has one rank; each stream counts its ops from 0."""
    ordered = [
        [step, 2 * dp_rank + pp_rank, dp_rank, pp_rank, str(kind), seq, None, None, 0.0, 0.5]
        for (step, dp_rank, pp_rank, kind), ops in streams.items()
        for seq in range(ops)
    ]
    rows = data.draw(st.permutations(ordered))
    row, column, more = data.draw(st.sampled_from(rows)), data.draw(st.sampled_from(["rank", "seq"])), data.draw(BIT)
    row[list(SCHEMA).index(column)] += more
    only = column == "rank" and sum(other[2:4] == row[2:4] for other in rows) == 1
    with pytest.raises(TraceError) if more and not only else nullcontext():
        _check_identity(pl.DataFrame(rows, dict(SCHEMA), orient="row"), Origin("x", {}))


def test_the_outline_of_a_shuffled_trace_has_one_op_of_each_worker_and_step() -> None:
    whole = trace(slow_frame((0, 1)))
    shuffled = trace(slow_frame((0, 1)).sample(fraction=1.0, shuffle=True, seed=1))
    assert shuffled.outline().ops.height == whole.outline().ops.height == 8
    assert shuffled.coverage() == whole.coverage()


@examples(25)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30))
def test_step_positions_are_ranks_among_the_distinct_steps(steps: list[int]) -> None:
    distinct = sorted(set(steps))
    found = step_positions(np.array(steps, np.int32), np.array(distinct, np.int32))
    assert found.tolist() == [distinct.index(step) for step in steps]


# ---- the file

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@examples(15)
@given(
    name=NAMES,
    metadata=st.dictionaries(NAMES, JSON, max_size=4),
    starts=st.sets(st.integers(0, 2**31 - 1), max_size=3).map(lambda steps: {step: 40.0 * step for step in steps}),
    sizes=st.fixed_dictionaries({size: st.integers(1, 4) for size in ("tp", "cp", "ep", "dsp")}),
)
def test_a_file_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    metadata: dict[str, Any],
    starts: dict[int, float],
    sizes: dict[str, int],
) -> None:
    path = tmp_path_factory.getbasetemp() / "round trip.parquet"
    written = Trace.from_frame(
        slow_frame(), Layout(dp=2, pp=2, **sizes), name=name, metadata=metadata, step_starts=starts
    )
    written.write_parquet(path)
    read = read_parquet(path)
    assert read.ops.equals(written.ops)
    assert read.ops.schema == written.ops.schema
    assert (read.layout, read.name) == (written.layout, written.name)
    assert dict(read.metadata) == metadata
    assert dict(read.step_starts) == starts


def test_a_name_that_utf8_cannot_hold_gets_escapes(tmp_path: Path) -> None:
    slow_trace(name="half\udcff").write_parquet(tmp_path / "a.parquet")
    assert read_parquet(tmp_path / "a.parquet").name == "half\\udcff"


def test_uuids_of_gpus_are_those_that_the_metadata_says_in_utf8() -> None:
    gpus = {"0": {"uuid": "GPU-a"}, "1": {"uuid": "b\udcff"}, "2": {"uuid": 3}, "3": {}, "4": "GPU", "5": {"uuid": ""}}
    assert gpu_uuids({"gpus": gpus}) == {"0": "GPU-a", "1": "b\\udcff"}
    assert gpu_uuids({}) == gpu_uuids({"gpus": ["GPU-a"]}) == {}


def test_a_redacted_trace_keeps_what_its_analysis_reads_and_no_name() -> None:
    queued = {"0": 0.5, "1": "ada", "node-a": 0.25}
    collected = {"nested": True, "user": "ada"}
    redacted = slow_trace(metadata={RUN_QUEUE: queued, "collect": collected, "hosts": {"0": "node-a"}}).redacted()
    assert redacted.metadata == {RUN_QUEUE: {"0": 0.5}, "collect": {"nested": True}, "hosts": {"0": "host-1"}}
    plain = slow_trace(metadata={RUN_QUEUE: "ada", "collect": "ada"}).redacted()
    assert (plain.name, plain.metadata) == ("job", {"hosts": {}})


def test_any_file_name_is_that_file(tmp_path: Path) -> None:
    """Characters that mean something to a shell or to polars mean nothing here; a long name has no room for more."""
    for name in ("[ab]*?.parquet", "ü 漢.parquet", "~.parquet", "s3:x.parquet", "x" * 250):
        with case(name):
            slow_trace().write_parquet(tmp_path / name)
            assert [path.name for path in tmp_path.iterdir()] == [name]
            assert tracekit.load(tmp_path / name).trace.ops.height == 2 * OPS_PER_STEP
        (tmp_path / name).unlink()


def test_the_same_job_in_either_format_gives_the_same_ops(tmp_path: Path) -> None:
    published_columns(slow_frame((0, 1))).write_parquet(tmp_path / "trace.parquet")
    (tmp_path / "meta.yaml").write_text("dp_size: 2\npp_size: 2\nworld_size: 4\ntrial_name: 12\nextra: [1]\n")
    read = read_published(tmp_path / "trace.parquet", tmp_path / "meta.yaml")
    assert read.ops.equals(slow_trace().ops)
    assert (read.layout, read.name) == (LAYOUT, "12")
    assert dict(read.metadata) == {"format": "published", "run_id": None}


def test_a_large_published_file_is_read_like_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its rows come in order; what does not fit is refused in the same words."""
    (tmp_path / "meta.yaml").write_text("dp_size: 2\npp_size: 2\nworld_size: 4\n")
    few = published_columns(slow_frame((0, 1))).with_columns(
        pl.col("start_ts", "duration").cast(pl.Float32), pl.col("stage").cast(pl.Int8), pl.col("step").cast(pl.Int64)
    )
    row, cell = pl.int_range(pl.len()) == 3, {"step": 1 << 40, "mb_id": 1 << 40, "duration": -1.0, "rank": 7}
    bad = [
        few.with_columns(pl.when(row).then(pl.lit(value)).otherwise(name).alias(name)) for name, value in cell.items()
    ]
    found = []
    for most, in_a_group in ((canonical.MOST_ROWS_AT_ONCE, None), (0, 1)):
        monkeypatch.setattr(canonical, "MOST_ROWS_AT_ONCE", most)
        monkeypatch.setattr(canonical, "MOST_ROWS_AS_TABLE", most)
        for ops in (few, *bad):
            ops.write_parquet(tmp_path / "trace.parquet", row_group_size=in_a_group)
            try:
                found.append(read_published(tmp_path / "trace.parquet", tmp_path / "meta.yaml").ops.sort(KEYS).rows())
            except TracekitError as error:
                found.append(str(error))
    assert found[:5] == found[5:]
    assert [type(one) for one in found[:5]] == [list, str, str, str, str]


def test_the_order_of_rows_changes_no_number() -> None:
    ops = slow_frame((0, 1))
    shuffled = trace(ops.sample(fraction=1, shuffle=True, seed=0))
    assert shuffled.ops.sort(KEYS).equals(trace(ops).ops.sort(KEYS))
    assert shuffled.coverage() == trace(ops).coverage()
    assert shuffled.worker_ranks() == trace(ops).worker_ranks()
    assert (
        PipelineJob(shuffled).whatif(fix=["worker=1,0"]).to_dict()
        == PipelineJob(trace(ops)).whatif(fix=["worker=1,0"]).to_dict()
    )


# ---- the words


def test_a_size_is_an_integer_of_some_gpus() -> None:
    sizes: list[Any] = [0, -1, 1.0, "4", True, None, LARGEST_SIZE + 1, 10**4000]
    for number, size in enumerate(sizes):
        with case(number):
            with pytest.raises(LayoutError, match=r"layout: tp is .*; expected an integer from 1 to 1048576") as caught:
                Layout(tp=size)
            assert len(str(caught.value)) < 150


def test_a_layout_knows_its_world() -> None:
    assert Layout(dp=4, pp=2, tp=8, cp=2, dsp=3).world_size == 4 * 2 * 8 * 2 * 3
    assert Layout(dp=4, pp=2, dsp=3).workers == 4 * 3 * 2
    assert not Layout(pp=8).has_dp_collectives
    assert Layout(dsp=2).has_dp_collectives
    assert Layout.from_dict(LAYOUT.to_dict()) == LAYOUT
    with pytest.raises(LayoutError, match="world_size 6 is not a multiple of dp 4 x pp 1 x tp 1 x cp 1 = 4"):
        Layout(dp=4, world_size=6)
    for sizes in ({"dp": 2**20, "pp": 2}, {"dp": 2, "dsp": 2**20, "world_size": 2}):
        with pytest.raises(LayoutError, match="2097152 workers or GPUs; expected at most 1048576"):
            Layout(**sizes)


def test_every_kind_has_a_code_and_one_reported_name() -> None:
    assert [kind.code for kind in KINDS] == list(range(len(KINDS)))
    groups = kind_groups(KINDS)
    assert sorted(kind for kinds in groups.values() for kind in kinds) == sorted(KINDS)
    assert groups["forward-pp-comm"] == (OpKind.FORWARD_SEND, OpKind.FORWARD_RECV)
    assert {kind for kind in KINDS if kind.is_communication} == COMMUNICATION


def test_every_error_is_a_tracekit_error_and_documented() -> None:
    from tracekit.base import errors

    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, Exception) and error.__module__ == errors.__name__:
            assert issubclass(error, TracekitError)
            assert error.__doc__, name
