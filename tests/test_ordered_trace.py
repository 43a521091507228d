"""A large file is read without a table of its ops, and gives what a table of them gives."""

from dataclasses import replace
from functools import partial

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.attribution.test_exact_attribution import specs
from tests.cases import case
from tests.handmade import published_columns, slow_frame, slow_trace, write_canonical
from tests.properties import examples
from tracekit.base.errors import TracekitError
from tracekit.collectors.importers.published import read_published
from tracekit.sources.load import load
from tracekit.synth import synthesize
from tracekit.trace import canonical
from tracekit.trace.canonical import Trace, read_parquet
from tracekit.trace.model import TimeUnit
from tracekit.trace.ordered import OrderedTrace
from tracekit.trace.schema import SCHEMA

IN_ORDER = ["step", "dp_rank", "pp_rank", "kind", "seq"]


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Every file is large."""
    monkeypatch.setattr(canonical, "MOST_ROWS_AS_TABLE", 0)


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
    bad["beyond all bounds"] = good.with_columns(start=pl.when(row == 33).then(1e9).otherwise("start"))
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


def on_a_clock(ops, zero, per_second):
    """Integers on a clock on which steps begin 20 s apart."""
    integers = ops.with_columns((pl.col("start", "duration") * per_second).round().cast(pl.Int64))
    return integers.with_columns(pl.col("start") + (zero + 20 * pl.col("step").cast(pl.Int64)) * per_second)


def shapes():
    """Name -> the same job as tables of users have it, and the unit of their times."""
    ops = slow_frame((3, 4, 7))
    transfer = pl.col("kind").cast(pl.String).str.contains("recv")
    first = pl.int_range(pl.len()).over("step", "rank") == 0
    wide = ops.with_columns(pl.col("step", "rank", "dp_rank", "pp_rank", "seq", "microbatch", "chunk").cast(pl.Int64))
    hosts = ops.with_columns(
        posted=pl.when(transfer).then(0.001), resumed=pl.when(transfer).then(pl.col("duration") / 2)
    )
    return {
        "as it is": (ops, None),
        "a clock across steps": (ops.with_columns(start=pl.col("start") + 20.0 * pl.col("step")), None),
        "seconds since 1970": (ops.with_columns(start=pl.col("start") + 1.7e9 + 20.0 * pl.col("step")), None),
        "half precision": (ops.with_columns(pl.col("start", "duration").cast(pl.Float32)), None),
        "microseconds": (ops.with_columns((pl.col("start", "duration") * 1e6).round().cast(pl.Int64)), TimeUnit.US),
        "milliseconds": (ops.with_columns(pl.col("start", "duration") / 0.001), TimeUnit.MS),
        "nanoseconds since 1970": (on_a_clock(ops, 1_700_000_000, 10**9), TimeUnit.NS),
        "microseconds since a start": (on_a_clock(ops, 8000, 10**6), TimeUnit.US),
        "one rank for two workers": (on_a_clock(ops.with_columns(rank=pl.col("rank") // 2), 8000, 10**6), TimeUnit.US),
        "wide numbers": (wide, None),
        "kinds as text": (ops.with_columns(pl.col("kind").cast(pl.String)), None),
        "kinds as categories": (ops.with_columns(pl.col("kind").cast(pl.String).cast(pl.Categorical)), None),
        "no chunks": (ops.drop("chunk"), None),
        "no microbatches": (ops.drop("chunk", "microbatch"), None),
        "more columns": (ops.with_columns(host=pl.lit("node"), iteration=1), None),
        "times of hosts": (hosts, None),
        "times of hosts, milliseconds": (
            hosts.with_columns(pl.col("start", "duration", "posted", "resumed") * 1e3), TimeUnit.MS
        ),
        "threads off their cores": (
            ops.with_columns(pl.when(first).then(pl.lit([0.25])).alias(name) for name in ("off_cpu", "queued")), None
        ),
        "waits inside workers": (ops.with_columns(waited=pl.concat_list("duration") / 4), None),
        "rows of exchanges": (ops.with_columns(sent=pl.lit([1, 2]), received=pl.lit([2, 1])), None),
    }  # fmt: skip


@pytest.mark.parametrize(
    "row_groups", [5, pytest.param(None, marks=pytest.mark.slow)], ids=["any order", "as recorded"]
)
def test_every_shape_of_a_file_gives_what_its_table_gives(tmp_path, row_groups):
    """In any order of rows and any row groups: the same ops, to the last bit, starts of steps and outline."""
    for name, (ops, unit) in shapes().items():
        with case(name):
            rows = ops if row_groups is None else ops.sample(fraction=1.0, shuffle=True, seed=1)
            path = write_canonical(tmp_path / "job.parquet", rows)
            rows.write_parquet(path, row_group_size=row_groups, metadata=pl.read_parquet_metadata(path))
            read = partial(read_parquet, unit=unit)
            ordered, table = read(path), as_table(path, read)
            assert (type(ordered), type(table)) == (OrderedTrace, Trace)
            assert ordered.optional == table.optional
            assert dict(ordered.step_starts) == dict(table.step_starts)
            assert ordered.metadata == table.metadata
            assert ordered.coverage() == table.coverage()
            assert ordered.worker_ranks() == table.worker_ranks()
            names = ["start", "duration", "chunk", "microbatch", *{"posted", "resumed"} & table.optional]
            for mine, theirs in zip(ordered.ordered(*names), table.ordered(*names), strict=True):
                assert mine.tobytes() == theirs.tobytes()
            of_workers = ordered.outline().ops.columns
            keys = [key for key in IN_ORDER if key in of_workers]
            outlines = [each.outline().ops.select(of_workers).sort(keys) for each in (ordered, table)]
            assert outlines[0].equals(outlines[1])
            in_order = table.ops.sort(IN_ORDER)
            assert ordered.ops.select(in_order.columns).equals(in_order)
            assert ordered.ops.schema == table.ops.schema


def test_a_published_file_on_any_clock_gives_what_its_table_gives(tmp_path):
    layout = tmp_path / "layout.yaml"
    layout.write_text("dp_size: 2\npp_size: 2\ntp_size: 1\nworld_size: 4")
    for name, (ops, unit) in shapes().items():
        if {*ops.columns} != {*SCHEMA}:
            continue
        with case(name):
            published_columns(ops).write_parquet(path := tmp_path / "job.parquet")
            read = partial(read_published, layout_path=layout, unit=unit)
            ordered, table = read(path), as_table(path, read)
            assert (type(ordered), type(table)) == (OrderedTrace, Trace)
            assert dict(ordered.step_starts) == dict(table.step_starts)
            assert ordered.ops.equals(table.ops.sort(IN_ORDER))
