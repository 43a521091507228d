"""Labels that are over-represented among chosen ops, by shares of their excess time computed by hand."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.small_jobs import of_steps
from tests.properties import examples
from tracekit.analysis.whatif.timeline import labelled_ops, over_represented
from tracekit.trace.canonical import Trace
from tracekit.trace.facts import STEP_VALUES

METADATA = {
    "hosts": {"0": "a", "1": "a", "2": "b"},
    "gpus": {"0": {"model": "H100"}, "1": {"model": "H100"}, "2": {"model": "H800"}},
}


def job() -> Trace:
    """Five steps of three ranks; a forward takes 1 s. In steps 0 and 1, rank 2 takes 4 s and rank 0 takes 2 s; in step
    3, rank 1 takes 2 s.
    """
    times = [[2.0, 1.0, 4.0], [2.0, 1.0, 4.0], [1.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 1.0]]
    steps = [[[("forward-compute", seconds), ("backward-compute", 2.0)] for seconds in ranks] for ranks in times]
    return replace(of_steps(steps), metadata=METADATA)


def test_the_excess_is_what_ops_take_beyond_the_median_of_their_peers_without_their_waits() -> None:
    """All-reduces wait up to 3 s for the slowest, and then take 0.01 s as always."""
    ops = labelled_ops([job()])
    assert set(ops["op kind"]) == {"forward-compute", "backward-compute", "all-reduce"}
    found = ops.filter(pl.col("excess_s") > 1e-9).sort("step", "rank").select("step", "rank", "host", "excess_s").rows()
    assert found == [(0, 0, "a", 1.0), (0, 2, "b", 3.0), (1, 0, "a", 1.0), (1, 2, "b", 3.0), (3, 1, "a", 1.0)]


def test_values_are_ranked_by_how_much_more_of_the_excess_they_have_among_the_chosen() -> None:
    """Among steps 0 and 1, host b has 6 of 8 s, rank 0 has 2 of 8 s; elsewhere rank 1, of host a, has the only second.

    Kinds and stages do not differ: forwards have all of the excess on both sides.
    """
    ops = labelled_ops([job()])
    found = over_represented(ops, ops["step"] < 2)
    assert found.rows() == [
        ("DP rank", "2", 0.75, 0.0),
        ("GPU model", "H800", 0.75, 0.0),
        ("host", "b", 0.75, 0.0),
        ("rank", "2", 0.75, 0.0),
        ("DP rank", "0", 0.25, 0.0),
        ("rank", "0", 0.25, 0.0),
    ]
    back = over_represented(ops, ops["step"] >= 2)
    of_places = back.filter(pl.col("label").is_in(["rank", "host"])).rows()
    assert of_places == [("rank", "1", 1.0, 0.0), ("host", "a", 1.0, 0.25)]


def test_ops_of_workers_can_be_chosen_and_of_several_traces() -> None:
    ops = labelled_ops([job(), job()])
    assert ops["trace"].unique().sort().to_list() == [0, 1]
    found = over_represented(ops, ops["rank"] == 2)
    assert ("GPU model", "H800", 1.0, 0.0) in found.rows()
    assert "microbatch" not in found["label"]  # no op has one


def test_transfers_that_take_longer_are_told_by_their_kind() -> None:
    """In steps 0 and 1, the all-reduces of all three ranks take 0.5 s longer; in step 3, the forward of rank 1 does."""
    usual, slow = ("forward-compute", 1.0), ("forward-compute", 1.5)
    ran = of_steps([[[slow if (step, rank) == (3, 1) else usual] for rank in range(3)] for step in range(5)])
    longer = (pl.col("kind") == "all-reduce") & (pl.col("step") < 2)
    ran = replace(ran, ops=ran.ops.with_columns(pl.col("duration") + pl.when(longer).then(0.5).otherwise(0.0)))
    ops = labelled_ops([ran])
    found = over_represented(ops, ops["step"] < 2)
    assert found.select("label", "value").rows() == [
        ("op kind", "all-reduce"), ("DP rank", "0"), ("DP rank", "2"), ("rank", "0"), ("rank", "2")
    ]  # fmt: skip
    assert found["inside"].to_list() == pytest.approx([1.0, *[1 / 3] * 4])
    assert found["outside"].to_list() == pytest.approx([0.0] * 5)


def test_steps_are_told_by_the_tokens_that_the_loop_logged() -> None:
    """The ops with tokens in quarters: 18 have 10, 36 have 50, 9 have 800, 18 have 900; equal ones stay together.

    Step 1 of the second trace has no tokens.
    """
    tokens = {"0": 900.0, "1": 800.0, "2": 50.0, "3": 10.0, "4": 50.0}
    some = {step: count for step, count in tokens.items() if step != "1"}
    traces = [replace(job(), metadata={STEP_VALUES: {"tokens": each}}) for each in (tokens, some)]
    ops = labelled_ops(traces)
    found = over_represented(ops, ops["step"] < 2)
    shares = {(label, value): (inside, outside) for label, value, inside, outside in found.rows()}
    assert ops.filter(trace=1, step=1)["tokens of the step"].null_count() == 9
    # of the 16 s of these steps, 4 s are without tokens, 4 s in steps of 800, 8 s in steps of 900
    assert shares["tokens of the step", "800"] == (pytest.approx(0.25), 0.0)
    assert shares["tokens of the step", "900"] == (pytest.approx(0.5), 0.0)
    back = over_represented(ops, ops["step"] >= 2).filter(label="tokens of the step")
    assert back.rows() == [("tokens of the step", "10 to 50", pytest.approx(1.0), 0.0)]


def test_nothing_is_different_where_all_take_equally_long() -> None:
    even = of_steps([[[("forward-compute", 1.0)]] * 3] * 4)
    ops = labelled_ops([even])
    assert over_represented(ops, ops["step"] < 2).is_empty()


@examples(30)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.floats(0, 100)), min_size=1, max_size=30))
def test_shares_are_those_of_plain_loops(rows: list[tuple[bool, str, float]]) -> None:
    labels = {"GPU model": None, "stage": None, "DP rank": None, "op kind": None, "microbatch": None, "chunk": None}
    labels["tokens of the step"] = None
    ops = pl.DataFrame([{"host": value, "rank": value, "excess_s": excess, **labels} for _, value, excess in rows])
    ops = ops.with_columns(pl.col(*labels).cast(pl.String))
    found = over_represented(ops, pl.Series([chosen for chosen, _, _ in rows]))
    for label, value, inside, outside in found.rows():
        assert label in ("host", "rank")
        for share, side in ((inside, True), (outside, False)):
            whole = sum(excess for chosen, _, excess in rows if chosen is side)
            own = sum(excess for chosen, each, excess in rows if chosen is side and each == value)
            assert share == pytest.approx(own / whole if whole else 0.0)
        assert inside > outside
