"""Fuzzing the columns of a trace: types, nulls, infinities, huge integers, rows lost, doubled and moved."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import polars as pl
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.doors import analyse, ends_well
from tests.handmade import slow_frame
from tests.properties import examples
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.synth import Schedule, SynthSpec, parse_cause, synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import KINDS, Layout
from tracekit.trace.schema import SCHEMA

JOBS = ("handmade", "data parallel", "pipeline", "interleaved", "pauses", "one")


@cache
def base(name: str) -> tuple[pl.DataFrame, Layout]:
    """A small job whose kinds are text, so that any can be put in."""
    if name == "handmade":
        ops, layout = slow_frame((0, 1, 5)), Layout(dp=2, pp=2)
    else:
        sizes = {
            "data parallel": {"dp": 3},
            "pipeline": {"dp": 2, "pp": 3},
            "interleaved": {"dp": 2, "pp": 2, "vpp": 2},
            "pauses": {"dp": 2, "pp": 2},
            "one": {},
        }[name]
        layout = Layout(**sizes)
        causes = (parse_cause("python-gc"),) if name == "pauses" else ()
        schedule = Schedule("interleaved" if layout.vpp > 1 else "1f1b")
        trace = synthesize(SynthSpec(layout=layout, schedule=schedule, microbatches=4, steps=4, causes=causes))
        ops = trace.ops
    return ops.with_columns(pl.col("kind").cast(pl.String)), layout


INTEGERS = (0, 1, 2, 3, -1, 7, 127, 2**15, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63))
FLOATS = (0.5, 1e-300, 5e-324, 1e-9, 1e7, 1e9, 1.7e9, 1.7e12, 1.7e18, 1e100, 1.7e308, np.inf, -np.inf, np.nan)
NUMBERS = st.sampled_from((*INTEGERS, *FLOATS, None))
NUMERIC = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt32, pl.UInt64, pl.Int128, pl.Float32, pl.Float64)
OTHER = (pl.String, pl.Boolean, pl.Binary, pl.Categorical, pl.Datetime, pl.Duration, pl.Decimal(20, 3), pl.Null)
TYPES = st.sampled_from((*NUMERIC, *OTHER))
COLUMN = st.sampled_from(sorted(SCHEMA))
TIMES = st.sampled_from(["start", "duration"])
COUNTED = ["step", "dp_rank", "pp_rank", "kind"]


@st.composite
def changes(draw: st.DrawFn, *, among: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """One thing that happens to a trace."""
    what = draw(st.sampled_from(among or sorted(CHANGES)))
    arguments: dict[str, st.SearchStrategy[Any]] = {
        "put": st.tuples(COLUMN, NUMBERS, st.integers(0, 400), st.integers(1, 40)),
        "put everywhere": st.tuples(COLUMN, NUMBERS),
        "cast": st.tuples(COLUMN, TYPES),
        "leave out": st.tuples(COLUMN),
        "lose": st.tuples(st.integers(0, 2**31), st.floats(0, 0.6)),
        "lose where": st.tuples(
            st.sampled_from(["rank", "step", "kind", "pp_rank", "dp_rank", "seq"]), st.integers(0, 9)
        ),
        "double": st.tuples(st.integers(0, 2**31), st.floats(0, 0.3)),
        "scale": st.tuples(TIMES, st.sampled_from([0.0, -1.0, 1e-9, 1e-6, 1e-3, 0.5, 1e3, 1e6, 1e9, 1e300])),
        "shift": st.tuples(TIMES, st.sampled_from([-1e9, -1.0, -1e-3, 1e-3, 3600.0, 1e7, 1.7e9, 1.7e12])),
        "run on": st.tuples(st.sampled_from([1e-3, 1.0, 1e5, 1.7e9])),
        "shuffle": st.tuples(st.integers(0, 2**31)),
        "shuffle column": st.tuples(COLUMN, st.integers(0, 2**31)),
        "rename kinds": st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
        "spread": st.tuples(st.sampled_from(["step", "rank", "microbatch", "dp_rank"]), st.integers(1, 10**9)),
        "noise": st.tuples(TIMES, st.integers(0, 2**31), st.sampled_from([1e-6, 1e-3, 0.1, 10.0])),
        "round": st.tuples(st.sampled_from([1e-6, 1e-3, 1.0])),
        "renumber": st.just(()),
    }
    return (what, *draw(arguments[what]))


def _put(ops: pl.DataFrame, name: str, value: Any, first: int, count: int) -> pl.DataFrame:
    values = ops[name].to_list()
    for at in range(first % len(values), min(first % len(values) + count, len(values))):
        values[at] = value
    return ops.with_columns(pl.Series(name, values, strict=False))


def _shuffled(column: pl.Series, seed: int) -> pl.Series:
    return column.shuffle(seed)


def _renumber(ops: pl.DataFrame) -> pl.DataFrame:
    """As a recorder numbers what it has."""
    return ops.sort("start", maintain_order=True).with_columns(seq=pl.int_range(pl.len()).over(COUNTED))


CHANGES = {
    "put": _put,
    "put everywhere": lambda ops, name, value: ops.with_columns(pl.Series(name, [value] * ops.height, strict=False)),
    "cast": lambda ops, name, dtype: ops.with_columns(pl.col(name).cast(dtype, strict=False)),
    "leave out": lambda ops, name: ops.drop(name),
    "lose": lambda ops, seed, share: ops.sample(fraction=1 - share, seed=seed),
    "lose where": lambda ops, name, at: ops.filter(
        pl.col(name) != ops[name].unique().sort()[at % ops[name].n_unique()]
    ),
    "double": lambda ops, seed, share: pl.concat([ops, ops.sample(fraction=share, seed=seed)]),
    "scale": lambda ops, name, factor: ops.with_columns(pl.col(name) * factor),
    "shift": lambda ops, name, offset: ops.with_columns(pl.col(name) + offset),
    "run on": lambda ops, zero: ops.with_columns(pl.col("start") + zero + 20 * pl.col("step").cast(pl.Float64)),
    "shuffle": lambda ops, seed: ops.sample(fraction=1, shuffle=True, seed=seed),
    "shuffle column": lambda ops, name, seed: ops.with_columns(_shuffled(ops[name], seed)),
    "rename kinds": lambda ops, old, new: ops.with_columns(pl.col("kind").replace(str(old), str(new))),
    "spread": lambda ops, name, factor: ops.with_columns(pl.col(name).cast(pl.Int64) * factor),
    "noise": lambda ops, name, seed, size: ops.with_columns(
        (pl.col(name) + size * pl.Series(np.random.default_rng(seed).exponential(size=ops.height))).alias(name)
    ),
    "round": lambda ops, unit: ops.with_columns((pl.col("start", "duration") / unit).round() * unit),
    "renumber": _renumber,
}
SIZES = st.dictionaries(
    st.sampled_from(["dp", "pp", "vpp", "dsp", "tp", "world_size"]),
    st.sampled_from([1, 2, 3, 4, 1000, 2**20]),
    max_size=2,
)


def changed(name: str, what: list[tuple[Any, ...]]) -> pl.DataFrame:
    ops, _ = base(name)
    for change, *arguments in what:
        try:
            ops = CHANGES[change](ops, *arguments)
        except (pl.exceptions.PolarsError, TypeError, OverflowError, ValueError, IndexError, ZeroDivisionError):
            continue  # this one does not apply to what the others left
    return ops


#: Changes after which most traces are still analysed.
MILD = ("lose", "lose where", "noise", "round", "shuffle", "shuffle column", "spread", "rename kinds", "run on", "put")
STRATEGIES = {
    "test_mild_changes_end_in_a_report_or_one_error": (
        st.sampled_from(JOBS),
        st.lists(changes(among=MILD), min_size=1, max_size=3),
    ),
    "test_any_columns_end_in_a_report_or_one_error": (
        st.sampled_from(JOBS),
        st.lists(changes(), max_size=4),
        st.booleans(),
        st.none() | SIZES,
        st.sampled_from([None, None, "s", "ms", "us", "ns"]),
    ),
}


@examples(30)
@given(*STRATEGIES["test_any_columns_end_in_a_report_or_one_error"])
def test_any_columns_end_in_a_report_or_one_error(
    name: str, what: list[tuple[Any, ...]], renumbered: bool, sizes: dict[str, int] | None, unit: str | None
) -> None:
    ops = changed(name, [*what, ("renumber",)] if renumbered else what)

    def run() -> None:
        layout = base(name)[1] if sizes is None else Layout(**{"dp": 2, "pp": 2, **sizes})
        analyse(PipelineJob(Trace.from_frame(ops, layout, name="job", unit=unit)))

    ends_well(run)


@examples(20)
@given(*STRATEGIES["test_mild_changes_end_in_a_report_or_one_error"])
@example("data parallel", [("round", 1.0)])  # nothing takes any time
def test_mild_changes_end_in_a_report_or_one_error(name: str, what: list[tuple[Any, ...]]) -> None:
    """Recorded ops that were renumbered are a trace, whatever was lost of them; most reach the causes and fixes."""
    ops = changed(name, [*what, ("renumber",)])
    ends_well(lambda: analyse(PipelineJob(Trace.from_frame(ops, base(name)[1], name="job", unit="s"))))
