"""Absurd sizes: what no job has is an error or costs nothing; time and memory follow what is there, not its values."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import tracekit
from tests.cases import case
from tests.fuzz.doors import analyse
from tests.handmade import LAYOUT, published_columns, slow_frame, slow_trace, write_canonical
from tests.properties import examples
from tracekit.analysis.attribution import patterns
from tracekit.analysis.attribution.patterns import pattern_of_series, rising_pairs
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import FormatError, GraphError, SelectionError, TraceError
from tracekit.commands.options import parse_steps
from tracekit.dashboards.terminal.info import print_trace
from tracekit.report.findings import Unanalysed
from tracekit.trace.canonical import Trace
from tracekit.trace.facts import MOST_MISSING
from tracekit.trace.model import Layout

#: Runs a command in this process and prints the most memory it held, in MB: VmHWM, for what getrusage says begins with
#: the memory of the process that started this one.
MEASURED = r"""
import re, sys
from pathlib import Path
from tracekit.cli import main
sys.argv = ["tracekit", *sys.argv[1:]]
try:
    main()
finally:
    print(int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024, file=sys.stderr)
"""


def measured(*arguments: str | Path) -> tuple[int, int, str]:
    """Exit code, MB and stderr of a command."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments], capture_output=True, check=False, timeout=300, text=True
    )
    return done.returncode, int(done.stderr.splitlines()[-1]), done.stderr


def job(ops: pl.DataFrame, layout: Layout = LAYOUT, **more: Any) -> PipelineJob:
    return PipelineJob(Trace.from_frame(ops, layout, name="job", **more))


# ---- steps


@pytest.mark.slow
def test_10000_steps_take_memory_in_proportion(tmp_path: Path) -> None:
    """60,000 ops; a table of steps by steps alone would be 800 MB."""
    steps, random = 10_000, np.random.default_rng(0)
    ops = [
        pl.DataFrame(
            {"step": np.arange(steps), "seq": 0, "start": start, "duration": length * random.normal(1, 0.01, steps)}
        ).with_columns(rank=pl.lit(dp_rank), dp_rank=pl.lit(dp_rank), pp_rank=pl.lit(0), kind=pl.lit(kind))
        for dp_rank in range(2)
        for kind, start, length in (
            ("forward-compute", 0.0, 0.01),
            ("backward-compute", 0.011, 0.02),
            ("optimizer", 0.033, 0.001),
        )
    ]
    path = write_canonical(tmp_path / "long.parquet", pl.concat(ops), Layout(dp=2).to_dict())
    code, megabytes, _ = measured("whatif", path, "--json")
    assert code == 0
    assert megabytes < 500


@examples(30)
@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.25]) | st.floats(0, 10), max_size=60))
def test_rising_pairs_are_those_of_the_definition(series: list[float]) -> None:
    values = np.array(series)
    pairs = np.sign(values[None, :] - values[:, None])[np.triu_indices(len(values), 1)]
    assert rising_pairs(values) == pairs.sum()


@examples(12)
@given(st.integers(0, 2**32))
def test_no_period_is_missed_by_the_bound(seed: int) -> None:
    """The same period and share as from a look at every one, with steps missing or not."""
    random = np.random.default_rng(seed)
    count = int(random.integers(6, 150))
    steps = np.sort(random.choice(count * int(random.choice([1, 1, 2, 20])), count, replace=False)) + 100
    period = int(random.integers(2, max(3, count // 3)))
    series = 1 + random.normal(0, 0.03, count) + np.where(steps % period == 0, random.choice([0, 0.2, 0.5]), 0)
    found = patterns._period(series, steps)
    with mock.patch.object(patterns, "_possible_periods", return_value=np.arange(2, count // 3 + 1)):
        assert found == patterns._period(series, steps)


def test_step_numbers_far_apart_cost_nothing() -> None:
    numbers = {0: 0, 1: 1, 2: 2_000_000_000, 3: 2_000_000_001, 4: 2**31 - 2, 5: 2**31 - 1}
    ops = slow_frame(range(6)).with_columns(step=pl.col("step").replace_strict(numbers, return_dtype=pl.Int32))
    analyse(job(ops))
    assert pattern_of_series(np.array([1.0, 1.1] * 3), list(numbers.values())) is not None


def test_ids_of_two_billion_cost_nothing() -> None:
    analyse(job(slow_frame((0, 1)).with_columns(pl.col("microbatch") + 2_000_000_000)))


@pytest.mark.slow
def test_few_traced_of_a_million_dp_ranks_cost_what_they_are(tmp_path: Path) -> None:
    """16 workers of a million, two of them at the far end: by the values of their DP rank, steps would take GBs."""
    layout = Layout(dp=2**19, pp=2)
    far = pl.col("dp_rank") + (2**19 - 2)
    ops = slow_frame(range(40)).with_columns(dp_rank=far, rank=far * 2 + pl.col("pp_rank"))
    path = write_canonical(tmp_path / "few.parquet", ops, layout.to_dict())
    code, megabytes, _ = measured("whatif", path, "--json")
    assert code == 0
    assert megabytes < 500
    coverage = job(ops, layout).trace.coverage()
    assert (coverage.workers_expected, coverage.workers_traced) == (2**20, 4)
    assert len(coverage.missing_workers) == MOST_MISSING


class Watched(tuple):
    """A tuple that counts how often it is searched from its beginning or copied."""

    reads = 0

    def __contains__(self, value: object) -> bool:
        Watched.reads += 1
        return super().__contains__(value)

    def __iter__(self) -> Any:
        Watched.reads += 1
        return super().__iter__()


def test_dp_ranks_are_not_searched_once_for_each_of_them() -> None:
    """2,000 workers, and a few passes over their DP ranks: time in proportion to their number, not to its square."""
    count = 2_000
    ranks = np.arange(count)
    ops = pl.DataFrame({"rank": ranks, "dp_rank": ranks, "duration": np.linspace(1, 1.1, count)}).with_columns(
        step=0, pp_rank=0, seq=0, start=0.0, kind=pl.lit("forward-compute")
    )
    graph = job(ops, Layout(dp=count)).replay.graph
    graph.__dict__["dp_ranks"] = Watched(graph.dp_ranks)
    assert graph.label_names[-1] == "rank"
    assert Watched.reads < 10


# ---- layers, texts, files


def test_absurd_layers_in_the_metadata_are_an_error() -> None:
    message = r"its metadata says layers .*; expected 1 to 1000 on each stage"
    for layers in ([10**12, 10**12], [8, 1001]):
        with case(layers), pytest.raises(TraceError, match=message):
            job(slow_frame((0, 1)), metadata={"layers": layers}).whatif()


@pytest.mark.slow
def test_odd_layers_in_the_metadata_are_none() -> None:
    for layers in ("junk", {"0": 1}, [8], [8.0, 8.0], [True, 8], [-1, 8], [None, None], 10**12):
        with case(layers):
            analyse(job(slow_frame((0, 1)), metadata={"layers": layers}))


def test_stated_layers_are_checked_whether_needed_or_not() -> None:
    for layers in ((9,), (0, 9), (9, 999_999)):
        with case(layers), pytest.raises(SelectionError, match=r"layers .*: expected"):
            job(slow_frame((0, 1))).whatif(layers=layers)


def test_many_ranges_are_as_limited_as_one() -> None:
    many = ",".join(["0-999999"] * 1000)
    with pytest.raises(SelectionError, match="at most 1000000 numbers in all"):
        parse_steps(many, "--steps")
    with pytest.raises(SelectionError, match="more than 1000000 numbers"):
        job(slow_frame()).answer(f"stage={many}")


BOMB = "".join(
    f"a{at}: &a{at} [{','.join(['x' if at == 0 else f'*a{at - 1}'] * 9)}]\n" for at in range(12)
)  # 9 to the power of 12 when written out


def test_a_layout_file_is_a_few_plain_lines(tmp_path: Path) -> None:
    published_columns(slow_frame((0, 1))).write_parquet(tmp_path / "trace.parquet")
    for name, content, says in (
        ("billion laughs", BOMB, "alias"),
        ("merge key", "base: &base {dp_size: 2}\n<<: *base\n", "alias"),
        ("large", "x: " + "y" * 100_000, "larger than 65536 bytes"),
    ):
        (tmp_path / "meta.yaml").write_text("dp_size: 2\npp_size: 2\nworld_size: 4\n" + content)
        with case(name), pytest.raises(FormatError, match=f"meta.yaml: .*{says}"):
            tracekit.load(tmp_path / "trace.parquet", layout=tmp_path / "meta.yaml")


def test_a_parquet_file_of_one_value_repeated_is_no_trace(tmp_path: Path) -> None:
    row = slow_frame()[:1].cast({"kind": pl.String}).row(0, named=True)
    ops = pl.select(**{name: pl.repeat(value, 3_000_000) for name, value in row.items()})
    path = write_canonical(tmp_path / "bomb.parquet", ops)
    with pytest.raises(FormatError, match=r"3000000 rows of \d+ columns in \d+ bytes, too few for the times"):
        tracekit.load(path)


# ---- odd metadata, incomplete DP ranks


@pytest.mark.slow
def test_info_and_whatif_take_any_gpus() -> None:
    every: list[object] = [
        "H100", ["H100"], -1, None, {}, {"0": "H100"}, {"0": {}}, {"0": {"throttled": "often", "reasons": 5}},
        {"0": {"throttled": -0.5}}, {"0": {"throttled": 10**400}}, {"0": {"throttled": float("nan")}},
        {"0": {"throttled": 0.5, "reasons": ["heat"], "model": ["H", {"x": 1}], "host": None}},
        {"0": {"throttled": 0.5, "reasons": {"power": "x"}}, "x": {"model": "a\x1b[31m\nb"}},
    ]  # fmt: skip
    for number, gpus in enumerate(every):
        free = {"gpus": gpus, "hosts": gpus, "collect": gpus}
        with case(number):
            print_trace(slow_trace(metadata=free), Console(file=(out := io.StringIO()), width=100))
            assert "gpus" in out.getvalue()
            assert "\x1b[31m" not in out.getvalue()
            analyse(PipelineJob(slow_trace((0, 1, 2), metadata=free)))


def test_no_complete_dp_rank_is_said_with_what_each_lacks(tmp_path: Path) -> None:
    """DP rank 0 has stage 0 alone, DP rank 1 stage 1: every stage is there, no DP rank is whole."""
    ops = slow_frame((4, 5)).filter(pl.col("dp_rank") == pl.col("pp_rank"))
    broken = job(ops)
    with pytest.raises(GraphError) as caught:
        broken.whatif()
    message = str(caught.value)
    assert "no DP rank has ops on all 2 stages in any step" in message
    assert "DP rank 0 lacks stage 1 in step 4; DP rank 1 lacks stage 0 in step 4" in message
    assert "record all stages of one, or correct dp_rank, pp_rank and the layout's pp" in message
    assert isinstance(broken.stored(), Unanalysed)
    json.dumps(message)
