"""A large file is read without a table of its ops, and gives what a table of them gives."""

from dataclasses import replace

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.attribution.test_exact_attribution import specs
from tests.cases import case
from tests.handmade import slow_frame, slow_trace, write_canonical
from tests.properties import examples
from tracekit.base.errors import TracekitError
from tracekit.sources.load import load
from tracekit.synth import synthesize
from tracekit.trace import canonical, ordered
from tracekit.trace.canonical import Trace, read_parquet
from tracekit.trace.ordered import OrderedTrace
from tracekit.trace.schema import SCHEMA

IN_ORDER = ["step", "dp_rank", "pp_rank", "kind", "seq"]


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Every file is large, and read seven rows at a time."""
    monkeypatch.setattr(canonical, "MOST_ROWS_AS_TABLE", 0)
    monkeypatch.setattr(ordered, "PIECE_ROWS", 7)
    monkeypatch.setattr(ordered, "MOST_PIECES", 10_000)


def as_table(path, use):
    """What `use` makes of a file that is small."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(canonical, "MOST_ROWS_AS_TABLE", 1_000_000)
        return use(path)


@given(specs(), st.integers(0, 99))
@examples(12)
def test_rows_in_any_order_give_the_report_of_the_table(tmp_path_factory, spec, seed):
    path, table = tmp_path_factory.mktemp("drawn") / "job.parquet", synthesize(spec)
    replace(table, ops=table.ops.sample(fraction=1.0, shuffle=True, seed=seed)).write_parquet(path)
    job = load(path)
    assert type(job.trace) is OrderedTrace
    assert job.report.to_json() == as_table(path, lambda path: load(path).report.to_json())


def test_the_table_is_made_when_somebody_asks(tmp_path):
    """Two steps of 24 ops; one worker is missing from the second."""
    whole = slow_frame((0, 3)).filter(~((pl.col("step") == 3) & (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 0)))
    path = write_canonical(tmp_path / "job.parquet", whole.sample(fraction=1.0, shuffle=True, seed=1))
    expected = as_table(path, read_parquet)
    ordered_trace = read_parquet(path)
    assert type(expected) is Trace
    assert ordered_trace.rows == expected.rows == whole.height
    assert ordered_trace.coverage() == expected.coverage()
    assert ordered_trace.worker_ranks() == expected.worker_ranks()
    assert ordered_trace.steps.tolist() == [0, 3]
    assert ordered_trace.dp_ranks.tolist() == [0, 1]
    for asked in (False, True):  # before and after the table exists
        with case(asked):
            of_stage = expected.ops.filter(pl.col("pp_rank") == 1).sort(IN_ORDER)
            assert ordered_trace.of_stages([1]).sort(IN_ORDER).equals(of_stage)
            names = ("start", "duration", "chunk", "microbatch")
            for one, other in zip(ordered_trace.ordered(*names), expected.ordered(*names), strict=True):
                assert one.tolist() == other.tolist()
            assert ordered_trace.ops.equals(expected.ops.sort(IN_ORDER))
            assert ordered_trace.ops.schema == pl.Schema(SCHEMA)


def test_a_copy_with_other_fields_has_a_table(tmp_path):
    slow_trace().write_parquet(tmp_path / "job.parquet")
    found = read_parquet(tmp_path / "job.parquet")
    renamed = replace(found, name="other")
    assert (type(renamed), renamed.name) == (Trace, "other")
    assert renamed.ops.equals(slow_trace().ops.sort(IN_ORDER))
    assert found.without_steps([0]).steps.tolist() == [1]


def test_what_is_wrong_is_said_as_of_the_table(tmp_path):
    """With rows counted in the whole file."""
    good = slow_frame((0, 1))
    row, third = pl.int_range(pl.len()), {"start": float("nan"), "duration": -1.0, "rank": 3, "seq": 9, "dp_rank": 2}
    bad = {
        name: good.with_columns(pl.when(row == 33).then(pl.lit(value)).otherwise(name).alias(name))
        for name, value in third.items()
    }
    bad["kind"] = good.with_columns(kind=pl.when(row == 33).then(pl.lit("x")).otherwise(pl.col("kind").cast(pl.String)))
    bad["twice"] = pl.concat([good, good[20:21]])
    bad["stage"] = good.filter(pl.col("pp_rank") == 0)
    bad["milliseconds"] = good.with_columns(pl.col("start", "duration") * 1e3)
    bad["null"] = good.with_columns(step=pl.when(row == 33).then(None).otherwise("step"))
    for name, ops in (bad | {"step starts": good}).items():
        with case(name):
            starts = {"0": float("inf")} if name == "step starts" else {}
            path = write_canonical(tmp_path / f"{name}.parquet", ops, step_starts=starts)
            with pytest.raises(TracekitError) as expected:
                as_table(path, read_parquet)
            with pytest.raises(type(expected.value)) as found:
                read_parquet(path)
            assert str(found.value) == str(expected.value)


def test_what_only_a_table_can_hold_is_a_table(tmp_path):
    ops = slow_frame((0, 1, 2))
    others = {
        "a clock across steps": ops.with_columns(start=pl.col("start") + 20.0 * pl.col("step")),
        "times of the host": ops.with_columns(posted=pl.lit(0.001)),
        "no chunks": ops.drop("chunk"),
    }
    for name, frame in others.items():
        with case(name):
            path = write_canonical(tmp_path / "job.parquet", frame)
            found = read_parquet(path)
            assert type(found) is Trace
            assert found.ops.equals(as_table(path, read_parquet).ops)
