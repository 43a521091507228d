"""Experts in traces of `tracekit collect`, whose all-to-alls say which rows they moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.handmade import run
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import TraceError
from tracekit.report.report import Report
from tracekit.trace.canonical import Trace, read_parquet
from tracekit.trace.model import Layout

RANKS, STEPS = 4, 12
BASE, PER_TOKEN, TRANSFER, REST = 0.010, 1e-5, 0.002, 0.020
EVEN = np.full((3, RANKS), 1000)
HOT = np.array([[700, 700, 1900, 700], [800, 700, 1800, 700], [700, 700, 2000, 600]])
SKEW = np.array([[1900, 700, 700, 700], [700, 1800, 800, 700], [700, 600, 700, 2000]])
#: Ranks receive more than is sent, or one rank did not record what it moves.
UNEQUAL = {"received": pl.when(pl.col("received").is_not_null()).then(pl.lit([900] * RANKS))}
ONE_RANK_WITHOUT = {name: pl.when(pl.col("rank") != 2).then(name) for name in ("sent", "received")}
NOT_RECORDED = {
    name: pl.when(pl.col(name).is_not_null()).then(pl.lit([], pl.List(pl.Int64))) for name in ("sent", "received")
}


def trace(tokens: np.ndarray, *, slow: float = 1.0, **more: Any) -> Trace:
    """Steps of a forward and a backward through layers with these tokens, [layers, ranks]; 1 % of noise.

    A rank computes 10 ms + 10 us a token in forwards, twice that in backwards, rank 1 `slow` times as long; an
    all-to-all takes 2 ms.
    """
    rng, rows = np.random.default_rng(5), []

    def op(
        step: int, kind: str, begin: np.ndarray, end: np.ndarray, number: int, sent: Any = None, got: Any = None
    ) -> None:
        for rank in range(RANKS):
            moved = (None, None) if sent is None else (sent[rank], got[rank])
            microbatch = None if kind in {"all-reduce", "optimizer"} else 0
            rows.append((step, rank, kind, number, microbatch, begin[rank], end[rank] - begin[rank], *moved))

    for step in range(STEPS):
        now = np.zeros(RANKS)
        seq = dict.fromkeys(("forward-compute", "backward-compute", "forward-collectives", "backward-collectives"), 0)

        for direction, factor, layers in (("forward", 1, tokens), ("backward", 2, tokens[::-1])):
            own = np.full(RANKS, 1e-3)
            for layer in layers:
                sent = [[int(count) // RANKS for count in layer]] * RANKS
                got = [[int(layer[rank]) // RANKS] * RANKS for rank in range(RANKS)]
                for first, second in ((sent, got), (got, sent)):
                    done = now + own
                    op(step, f"{direction}-compute", now, done, seq[f"{direction}-compute"])
                    seq[f"{direction}-compute"] += 1
                    now = np.full(RANKS, done.max() + TRANSFER)
                    op(step, f"{direction}-collectives", done, now, seq[f"{direction}-collectives"], first, second)
                    seq[f"{direction}-collectives"] += 1
                    noise = 1 + 0.01 * rng.standard_normal(RANKS)
                    lasts = factor * (BASE + PER_TOKEN * layer) * noise * np.where(np.arange(RANKS) == 1, slow, 1.0)
                    own = lasts if first is sent else np.full(RANKS, 1e-3)
            op(step, f"{direction}-compute", now, now + own, seq[f"{direction}-compute"])
            now = now + own
        op(step, "all-reduce", now, np.full(RANKS, now.max() + REST), 0)
        now = np.full(RANKS, now.max() + REST)
        op(step, "optimizer", now, now + 0.001, 0)
    names = ("step", "rank", "kind", "seq", "microbatch", "start", "duration", "sent", "received")
    ops = pl.DataFrame(rows, names, orient="row").with_columns(
        dp_rank="rank", pp_rank=pl.lit(0), chunk=pl.when(pl.col("microbatch").is_not_null()).then(0), **more
    )
    return Trace.from_frame(ops, Layout(dp=RANKS, world_size=RANKS), name="experts")


def report(tokens: np.ndarray, **more: Any) -> Report:
    return PipelineJob(trace(tokens, **more)).whatif()


def longer(tokens: np.ndarray) -> float:
    """What the heaviest ranks compute beyond the mean, seconds a step: forwards once, backwards twice as long."""
    return float(3 * PER_TOKEN * (tokens.max(axis=1) - tokens.mean(axis=1)).sum())


@pytest.mark.parametrize(("tokens", "kind"), [(HOT, "hot-rank"), (SKEW, "skew")])
def test_uneven_experts_are_named_and_no_worker_is(tokens: np.ndarray, kind: str) -> None:
    found = report(tokens)
    assert [one.kind for one in found.findings] == [kind]
    assert found.findings[0].where.workers == found.findings[0].where.ranks == ()
    assert found.findings[0].saved_s == pytest.approx(longer(tokens), rel=0.05)
    assert found.verdict.label == "uneven work"


def test_a_worker_that_is_slow_beyond_its_tokens_is_named() -> None:
    """Three times as long, it takes longer than the hot rank."""
    found = report(HOT, slow=3.0)
    blamed = [worker.dp_rank for one in found.findings for worker in one.where.workers]
    assert set(blamed) == {1}


@pytest.mark.parametrize(
    "unknown", [UNEQUAL, ONE_RANK_WITHOUT, NOT_RECORDED], ids=["unequal", "one rank without", "not recorded"]
)
def test_without_loads_a_hot_rank_and_a_slow_worker_are_not_told_apart(unknown: dict[str, pl.Expr]) -> None:
    """Rank 2 has 1,900 tokens in the mean and its peers 700: 29 ms instead of 17 ms, 71 % longer."""
    found = report(HOT, **unknown)
    assert [one.kind for one in found.findings] == ["unknown-loads"]
    assert found.findings[0].evidence[0].value == pytest.approx(29 / 17, rel=0.02)
    assert found.findings[0].saved_s == pytest.approx(3 * PER_TOKEN * (1900 + 1800 + 2000 - 3 * 700), rel=0.05)
    assert found.answer.culprits == ()
    assert not found.trust.trustworthy
    assert "its loads were not recorded" in found.trust.reasons[-1]


def test_even_experts_are_nothing_to_name() -> None:
    found = report(EVEN)
    assert [one.kind for one in found.findings] == ["healthy"]


def test_the_command_reads_loads_and_prices_them(tmp_path: Path) -> None:
    """The heaviest rank moves 1,800 to 2,000 rows for the same 2 ms, so a transfer's slope is known to be nothing."""
    trace(HOT).write_parquet(tmp_path / "job.parquet")
    ran = run("whatif", tmp_path / "job.parquet", "--overlap", "--rebalance", "balanced", "--json")
    assert ran.code == 0, ran.err
    experts = json.loads(ran.out)["experts"]
    assert experts["source"] == "splits"
    assert [one["tokens_by_rank"] for one in experts["layers"]] == HOT.tolist()
    assert experts["rebalance"][0]["saved_s"] == pytest.approx(longer(HOT), rel=0.05)
    assert [(one["cause"], one["rank"]) for one in experts["causes"]] == [("hot-rank", 2)]


def test_rows_survive_the_file(tmp_path: Path) -> None:
    made = trace(SKEW)
    made.write_parquet(tmp_path / "job.parquet")
    assert read_parquet(tmp_path / "job.parquet").ops.equals(made.ops)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (pl.lit("many"), "expected lists of integers"),
        (pl.when(pl.col("seq") == 1).then(pl.lit([-1])), "expected rows >= 0"),
    ],
)
def test_rows_that_cannot_be_are_one_error(sent: pl.Expr, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        trace(EVEN, sent=sent)
