"""Units and clocks: what is no second is an error that names the unit, clock times become times of a step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import tracekit
from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job, of_steps
from tests.cases import case
from tests.handmade import LAYOUT, slow_frame, slow_trace, write_canonical
from tests.properties import examples
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import FormatError, TraceError
from tracekit.cli import commands
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

SAMPLES = Path(__file__).parents[1] / "sample_traces"
TIMES = pl.col("start", "duration")


def sample(name: str) -> Trace:
    return tracekit.load(SAMPLES / f"{name}.parquet").trace


def trace(ops: pl.DataFrame, layout: Layout = LAYOUT, **more: Any) -> Trace:
    return Trace.from_frame(ops, layout, name="job", **more)


def message(ops: pl.DataFrame, layout: Layout = LAYOUT, **more: Any) -> str:
    with pytest.raises(TraceError) as caught:
        trace(ops, layout, **more)
    return str(caught.value)


def job(forward_s: float, send_s: float = 5e-4, collective_s: float = 0.02, optimizer_s: float = 5e-3) -> pl.DataFrame:
    """The slow job with computes, transfers, collectives and optimizer of these lengths, one after the other."""
    length = {"forward-compute": forward_s, "backward-compute": 2 * forward_s, "optimizer": optimizer_s}
    kind = pl.col("kind").cast(pl.String)
    duration = (
        pl.when(kind.str.contains("send|recv"))
        .then(send_s)
        .otherwise(kind.replace_strict(length, default=collective_s, return_dtype=pl.Float64))
    )
    ops = slow_frame((0, 1)).with_columns(duration=duration)
    end = pl.col("duration").cum_sum().over("step", "rank", order_by="start")
    return ops.with_columns(start=end - pl.col("duration"))


# ---- seconds that cannot be meant


MS, US, NS = (1e3, "ms", "milliseconds"), (1e6, "us", "microseconds"), (1e9, "ns", "nanoseconds")


def test_another_unit_is_named_and_can_be_stated() -> None:
    """Whatever the job: the message names the unit, and with it the trace is the one it was."""
    for name, (factor, unit, word) in (
        ("healthy", MS), ("slow_worker", US), ("python_gc", NS), ("slow_last_stage", MS),
        ("collected", MS), ("collected", US), ("collected", NS),
    ):  # fmt: skip
        whole = sample(name)
        ops = whole.ops.with_columns(TIMES * factor)
        with case((name, unit)):
            told = message(ops, whole.layout)
            assert f"look like {word} taken for seconds" in told
            assert f"--unit {unit} " in told
            assert "\n" not in told
            read = trace(ops, whole.layout, unit=unit)
            assert read.metadata["time_unit"] == unit
            for column in ("start", "duration"):
                assert np.allclose(read.ops[column], whole.ops[column], rtol=1e-12, atol=1e-15)


def test_what_cannot_be_is_named() -> None:
    long = "a forward or backward takes 40 min (usual: 2 us to 3.00 s); the times look like milliseconds"
    short = "takes 2 ns (usual: 200 ns to 10.00 s); the times look like seconds divided"
    assert long in message(job(1600.0))
    assert short in message(job(1e-3, send_s=2e-9, collective_s=2e-9))


def test_what_can_be_is_no_alarm() -> None:
    usual = job(0.02)
    hung = (pl.col("rank") == 0) & (pl.col("seq") == 1)
    checkpoint = pl.lit("checkpoint", usual["kind"].dtype)
    saved = usual.filter(pl.col("kind") == "optimizer").with_columns(kind=checkpoint, duration=7200.0)
    for name, ops in {
        "tiny on a CPU": job(20e-6, send_s=3e-6, collective_s=3e-6, optimizer_s=5e-6),
        "huge, step of minutes": job(0.3, collective_s=3.0, optimizer_s=0.05),
        "recomputing, long context": job(3.0, send_s=0.1, collective_s=2.0, optimizer_s=5.0),
        "hung ops": usual.with_columns(duration=pl.when(hung).then(600.0).otherwise("duration")),
        "checkpoint of two hours": pl.concat([usual, saved]),
    }.items():
        with case(name):
            trace(ops)


def test_steps_that_last_longer_than_they_are_apart_give_the_unit_away() -> None:
    """The times of a tiny job in milliseconds could be the seconds of a large one, were it not for the step starts."""
    ops = job(1e-3, send_s=5e-5, collective_s=1e-3).with_columns(TIMES * 1e3)
    trace(ops)
    told = message(ops, step_starts={0: 1.7e9, 1: 1.7e9 + 0.02})
    assert "a step beside the time until the next one" in told
    assert "--unit ms" in told


def test_steps_that_last_far_shorter_than_they_are_apart_give_the_unit_away() -> None:
    """Seconds stated to be milliseconds: the step of a large job could be that of a tiny one."""
    ops = job(0.02, send_s=5e-4, collective_s=2e-3)
    trace(ops, unit="s", step_starts={0: 1.7e9, 1: 1.7e9 + 0.4})
    told = message(ops.with_columns(TIMES / 1e3), step_starts={0: 1.7e9, 1: 1.7e9 + 0.4})
    assert "a step beside the time until the next one lasts 0.00" in told
    assert "multiply start and duration by 1000, or" in told


def test_steps_that_start_at_the_same_time_say_nothing_about_the_unit() -> None:
    ops = job(1e-3, send_s=5e-5, collective_s=1e-3).with_columns(TIMES * 1e3)
    trace(ops, step_starts={0: 1.7e9, 1: 1.7e9})


def test_times_that_no_unit_explains_are_no_alarm() -> None:
    """Computes of 40 minutes beside transfers of 2 ns: what helps one of them makes the other worse."""
    trace(job(1600.0, send_s=2e-9))


def test_a_part_in_another_unit_is_named() -> None:
    """A rank, a stage, a part of the steps."""
    whole = sample("healthy")
    parts = {
        "rank 3": pl.col("rank") == 3,
        "ranks 8, 9, 10, 11": pl.col("pp_rank") == 2,
        "steps such as 109, 201": pl.col("step") >= 109,
    }
    for (whose, part), factor in itertools.product(parts.items(), (1e3, 1e6)):
        ops = whole.ops.with_columns(pl.when(part).then(TIMES * factor).otherwise(TIMES).name.keep())
        with case((whose, factor)):
            told = message(ops, whole.layout)
            assert f"{whose}: all work takes about" in told
            assert f"divide their start and duration by {factor:,.0f}" in told
            trace(ops, whole.layout, unit="s")


def test_a_rank_that_is_a_hundred_times_slower_is_no_other_unit() -> None:
    whole = sample("healthy")
    slow = (pl.col("rank") == 3) & (pl.col("kind") == "forward-compute")
    trace(
        whole.ops.with_columns(duration=pl.when(slow).then(pl.col("duration") * 100).otherwise("duration")),
        whole.layout,
    )


def test_starts_that_lost_digits_are_not_trusted() -> None:
    """A monotonic clock kept as float32: 4 ms at 40,000 s, 62.5 ms at 900,000 s."""
    whole = sample("healthy")
    for zero in (40_000.0, 900_000.0):
        starts = {step: zero + start - min(whole.step_starts.values()) for step, start in whole.step_starts.items()}
        ops = on_clock(whole, starts).with_columns(start=pl.col("start").cast(pl.Float32).cast(pl.Float64))
        trust = PipelineJob(trace(ops, whole.layout)).attribution.trust
        assert not trust.trustworthy, zero
        assert any("digits of the starts were lost" in reason for reason in trust.reasons), zero


def test_whole_numbers_are_no_seconds() -> None:
    """No clock gives whole seconds: integers that could just be seconds are taken for milliseconds."""
    ops = job(5e-3, collective_s=2e-3).with_columns((TIMES * 1e3).round())
    trace(ops)
    assert "milliseconds" in message(ops.with_columns(TIMES.cast(pl.Int64)))


def test_seconds_that_are_stated_are_believed_from_then_on(tmp_path: Path) -> None:
    ops = job(100.0)
    message(ops)
    trace(ops, unit="s").write_parquet(tmp_path / "slow.parquet")
    assert tracekit.load(tmp_path / "slow.parquet").trace.ops["duration"].max() == 200.0


def test_the_unit_of_the_input_is_not_that_of_a_canonical_file(tmp_path: Path) -> None:
    """Its times are seconds, whatever unit they were converted from: a thousand times as many are milliseconds."""
    trace(job(0.4).with_columns(TIMES * 1e3), unit="ms").write_parquet(tmp_path / "job.parquet")
    header = pl.read_parquet_metadata(tmp_path / "job.parquet")
    longer = pl.read_parquet(tmp_path / "job.parquet").with_columns(TIMES * 1e3)
    longer.write_parquet(tmp_path / "longer.parquet", metadata=header)
    with pytest.raises(TraceError, match="look like milliseconds taken for seconds: pass --unit ms"):
        tracekit.load(tmp_path / "longer.parquet")


def test_a_unit_that_is_stated_wrongly_is_said_so() -> None:
    told = message(job(0.02).with_columns(TIMES * 1e3), unit="ns")
    assert told.endswith("not the nanoseconds that were stated: pass --unit ms (unit='ms' in Python)")
    with pytest.raises(TraceError, match="unknown unit 'min'; expected one of s, ms, us, ns"):
        trace(job(0.02), unit="min")


def test_the_commands_take_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that pandas filled with milliseconds: refused by each command, taken by each with --unit."""
    write_canonical(tmp_path / "ms.parquet", job(0.02).with_columns(TIMES * 1e3))

    def error(*arguments: str) -> str:
        return str(CliRunner().invoke(commands, arguments).exception)

    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["whatif", "ms.parquet", "--json"],
        ["store", "list", "ms.parquet"],
        ["store", "export", "ms.parquet", "--out", "out.json.gz"],
        ["import", "ms.parquet", "--store", "jobs.duckdb"],
    ):
        assert "--unit ms" in error(*arguments)
        assert CliRunner().invoke(commands, [*arguments, "--unit", "ms"]).exit_code == 0
    assert CliRunner().invoke(commands, ["store", "list", "--store", "jobs.duckdb", "--job", "broken"]).exit_code == 0
    assert "--unit belongs to a TRACE" in error("whatif", "--store", "jobs.duckdb", "--unit", "s")


def test_a_format_with_a_unit_of_its_own_takes_no_other(tmp_path: Path) -> None:
    path = tmp_path / "trace_step0.json"
    path.write_text('[{"ph": "X", "args": {"rank": 0, "step": 0, "tp": 0, "pp": 0}}]')
    with pytest.raises(FormatError, match="fixes the unit of its times; leave out --unit"):
        tracekit.load(path, unit="us")


# ---- clock times


def on_clock(whole: Trace, starts: dict[int, float]) -> pl.DataFrame:
    """The ops of `whole` with starts on the clock on which its steps begin at `starts`."""
    zero = pl.col("step").cast(pl.Int64).replace_strict(starts, return_dtype=pl.Float64)
    return whole.ops.with_columns(start=pl.col("start") + zero)


@pytest.mark.parametrize("name", ["healthy", "slow_last_stage", "collected"])
def test_starts_since_1970_analyse_as_relative_ones(name: str) -> None:
    """Rounded to what a float of 1.7e9 can hold, as clocks give them, so that nothing was lost before the door."""
    whole = sample(name)
    starts = dict(whole.step_starts)
    ops = on_clock(whole, starts)
    zero = pl.col("step").cast(pl.Int64).replace_strict(starts, return_dtype=pl.Float64)
    relative = trace(ops.with_columns(start=pl.col("start") - zero), whole.layout, step_starts=starts)
    absolute = trace(ops, whole.layout, step_starts=starts)
    assert absolute.ops.equals(relative.ops)
    assert dict(absolute.step_starts) == starts
    unknown = trace(ops, whole.layout)
    expected, found = PipelineJob(relative).attribution, PipelineJob(unknown).attribution
    assert found.slowdown == pytest.approx(expected.slowdown, rel=1e-9)
    assert found.recorded_s == pytest.approx(expected.recorded_s, rel=3e-3)
    assert found.trust.trustworthy == expected.trust.trustworthy
    assert unknown.step_starts.keys() == starts.keys()
    assert all(abs(unknown.step_starts[step] - start) < 0.05 for step, start in starts.items())


@pytest.mark.parametrize(("unit", "per_second"), [("ns", 10**9), ("us", 10**6)])
def test_integers_on_a_clock_lose_no_digit(unit: str, per_second: int) -> None:
    """As floats, nanoseconds since 1970 would be rounded to 256 of them."""
    numbers = slow_frame((3, 4, 9)).with_columns((TIMES * per_second).round().cast(pl.Int64) + 1)
    zero = 1_700_000_000_123_456_789 * per_second // 10**9
    clock = numbers.with_columns(pl.col("start") + zero + pl.col("step").cast(pl.Int64) * 20 * per_second)
    found, expected = trace(clock, unit=unit), trace(numbers, unit=unit)
    first = expected.ops["start"].min()
    assert (found.ops["start"] - (expected.ops["start"] - first)).abs().max() < 1e-14
    assert found.ops["duration"].equals(expected.ops["duration"])
    assert found.step_starts[9] - found.step_starts[3] == pytest.approx(120)
    assert found.step_starts[3] == pytest.approx(1_700_000_060.123456, abs=1e-6)


def test_a_monotonic_clock_is_seen_by_its_running_on() -> None:
    whole = slow_trace((5, 6, 7))
    found = trace(on_clock(whole, {5: 8000.25, 6: 8016.0, 7: 8031.75}))
    assert found.ops["start"].equals(whole.ops["start"])
    assert dict(found.step_starts) == {5: 8000.25, 6: 8016.0, 7: 8031.75}


def test_time_between_steps_counts_on_any_clock_that_runs_on() -> None:
    """Steps of 0.31 s, one after the other; before the fourth all ranks stand still for 0.5 s."""
    whole = data_parallel_job([[FORWARD, BACKWARD]] * 2, steps=6)
    for zero in (0.0, 0.8, 40.0, 8000.25, 1.7e9):
        starts = {step: zero + 0.31 * step + (0.5 if step >= 3 else 0.0) for step in range(6)}
        found = PipelineJob(trace(on_clock(whole, starts), whole.layout)).whatif()
        with case(zero):
            (cause,) = [cause for cause in found.findings if cause.priced]
            assert str(cause.kind) == "checkpoint-stalls"
            assert cause.saved_s == pytest.approx(0.5 / 6, abs=1e-6)


def test_a_clock_that_begins_with_the_job_is_no_stall() -> None:
    whole = data_parallel_job([[FORWARD, BACKWARD]] * 2, steps=6)
    for zero in (0.0, 0.8, 40.0):
        found = PipelineJob(
            trace(on_clock(whole, {step: zero + 0.31 * step for step in range(6)}), whole.layout)
        ).whatif()
        assert [str(cause.kind) for cause in found.findings] == ["healthy"], zero
        assert found.verdict.lost_s == 0
    late = slow_frame((5, 6, 7)).with_columns(pl.col("start") + 100.0)  # late data in each step: no clock
    assert trace(late).ops["start"].min() == 100.0


@st.composite
def steps_of_any_length(draw: st.DrawFn) -> tuple[Trace, dict[int, float]]:
    """A job of 2 to 30 steps of unequal length, one of which may be long, and when its steps begin on one clock; ranks
    may stand still between them.
    """
    lengths = draw(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=30))
    lengths[draw(st.integers(-1, len(lengths) - 1))] *= draw(st.sampled_from([1.0, 5.0, 300.0]))
    programs = [[[("forward-compute", length), BACKWARD], [FORWARD, BACKWARD]] for length in lengths]
    pauses = draw(st.lists(st.sampled_from([0.0, 0.0, 0.01, 2.0]), min_size=len(lengths), max_size=len(lengths)))
    begin, starts = draw(st.sampled_from([0.0, 0.3, 40.0, 8000.25])), {}
    for step, (length, pause) in enumerate(zip(lengths, pauses, strict=True)):
        starts[step] = begin
        begin += max(length, FORWARD[1]) + BACKWARD[1] + 0.01 + pause
    return of_steps(programs), starts


@given(steps_of_any_length())
@examples(60)
def test_a_clock_is_told_from_starts_of_each_step_whatever_steps_last(drawn: tuple[Trace, dict[int, float]]) -> None:
    whole, starts = drawn
    relative, running = (trace(ops, whole.layout, unit="s") for ops in (whole.ops, on_clock(whole, starts)))
    assert relative.ops["start"].equals(whole.ops["start"])
    assert not relative.step_starts
    assert running.step_starts.keys() == starts.keys()
    length = running.ops.group_by("step").agg(s=pl.col("start").add(pl.col("duration")).max() - pl.col("start").min())
    usual = whole.ops.group_by("step").agg(s=pl.col("start").add(pl.col("duration")).max())
    assert length.sort("step")["s"].to_list() == pytest.approx(usual.sort("step")["s"].to_list(), abs=1e-6)


def test_two_steps_show_a_clock_only_if_every_rank_begins_where_it_ended() -> None:
    whole = data_parallel_job([[FORWARD, BACKWARD]] * 2, steps=2)  # steps of 0.31 s
    for moved, runs_on in ((0.31, True), (0.3095, True), (0.3, False), (0.2, False), (0.0, False)):
        with case(moved):
            assert bool(trace(on_clock(whole, {0: 0.0, 1: moved}), whole.layout).step_starts) == runs_on
    late = pl.col("rank").eq(0) & pl.col("step").eq(1)  # of one rank only: it is late, and no clock runs
    ops = whole.ops.with_columns(start=pl.when(late).then(pl.col("start") + 5.0).otherwise("start"))
    assert not trace(ops, whole.layout).step_starts


def test_one_step_alone_starts_at_its_own_zero() -> None:
    whole = data_parallel_job([[FORWARD, BACKWARD]] * 2, steps=1)
    assert trace(on_clock(whole, {0: 5.0}), whole.layout).ops["start"].min() == 5.0


def test_clock_times_in_another_unit_are_named() -> None:
    for unit, per_second in (("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
        ops = slow_frame((0, 1, 2)).with_columns(start=(pl.col("start") + 1.7e9) * per_second)
        assert f"pass --unit {unit} " in message(ops)


def test_the_start_of_a_step_is_a_time() -> None:
    for start in (float("nan"), float("inf"), 1.7e12):
        assert "expected seconds since 1970" in message(slow_frame(), step_starts={0: start})
