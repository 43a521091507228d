"""MegaScan's files of ranks and the trace aggregated from them, as its README and its files show the formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.handmade import read_any, run
from tracekit.base.errors import FormatError
from tracekit.sources.load import load
from tracekit.trace.canonical import Trace

MS = 1_000_000
#: (stage, scope, microbatch, chunk, start, end) of an iteration, ms: two stages, a microbatch, two chunks; the last
#: chunk of the last stage takes longer.
COMPUTES = (
    (0, "forward", 0, 0, 1, 11),
    (1, "forward", 0, 0, 12, 22),
    (0, "forward", 0, 1, 23, 33),
    (1, "forward", 0, 1, 34, 54),
    (1, "backward", 0, 1, 54, 94),
    (0, "backward", 0, 1, 95, 115),
    (1, "backward", 0, 0, 116, 136),
    (0, "backward", 0, 0, 137, 157),
)
ROWS = [
    (0, "forward-compute", 0, 0, 0.0, 0.010),
    (0, "forward-compute", 1, 1, 0.022, 0.010),
    (0, "backward-compute", 0, 1, 0.094, 0.020),
    (0, "backward-compute", 1, 0, 0.136, 0.020),
    (1, "forward-compute", 0, 0, 0.011, 0.010),
    (1, "forward-compute", 1, 1, 0.033, 0.020),
    (1, "backward-compute", 0, 1, 0.053, 0.040),
    (1, "backward-compute", 1, 0, 0.115, 0.020),
]


def records(stage: int, scopes: tuple[Any, ...] = COMPUTES, *, slower: float = 1.0) -> list[dict[str, Any]]:
    """What one rank writes of one iteration; scopes may contain others."""
    marks = []
    for order, (at, name, microbatch, chunk, start, end) in enumerate(scopes):
        if at == stage:
            place = (
                {"microbatch": microbatch, "model_chunk": chunk, "pp_rank": stage}
                if name in ("forward", "backward")
                else {}
            )
            marks.append((start, 1, order, {"name": name, "ph": "B", "rel_ts": round(start * slower * MS)}))
            marks.append((end, 0, -order, {**place, "name": name, "ph": "E", "rel_ts": round(end * slower * MS)}))
    marks.sort(key=lambda mark: mark[:3])
    last = round(160 * slower * MS)
    return [
        {"name": "iteration", "ph": "B", "pad_before": 0},
        *(mark[3] for mark in marks),
        {"name": "iteration", "ph": "E", "rel_ts": last, "duration_wall": last, "duration_cuda": last},
    ]


def folder(path: Path, iterations: int = 3, scopes: tuple[Any, ...] = COMPUTES) -> Path:
    """The first iteration takes five times as long as the others."""
    path.mkdir(exist_ok=True)
    for stage in range(2):
        content = [record for step in range(iterations) for record in records(stage, scopes, slower=1 if step else 5)]
        (path / f"benchmark-data-0-pipeline-{stage}-tensor-0.json").write_text(json.dumps(content, indent=2))
    return path


def aggregated(path: Path, iterations: int = 3) -> Path:
    events = []
    for step in range(iterations):
        for stage in range(2):
            for record in records(stage)[1:-1]:
                args = {key: value for key, value in record.items() if key not in ("name", "ph", "rel_ts")}
                ts = record["rel_ts"] // 1000 + step * 200_000
                kept = {key: record[key] for key in ("name", "ph")}
                events.append(
                    {**kept, "cname": "thread_state_running", "ts": ts, "pid": stage, "tid": 0,
                     "args": {"iteration": step, **args}}
                )  # fmt: skip
    events.sort(key=lambda event: event["ts"])
    path.write_bytes(gzip.compress(json.dumps(events, indent=2).encode()))
    return path


def rows(trace: Trace, step: int) -> list[tuple[Any, ...]]:
    ops = trace.ops.filter(pl.col("step") == step).sort("pp_rank", "kind", "seq")
    columns = ("pp_rank", pl.col("kind").cast(pl.String), "seq", "chunk", "start", "duration")
    return [(*row[:4], pytest.approx(row[4]), pytest.approx(row[5])) for row in ops.select(columns).rows()]


def test_a_folder_is_a_pipeline_without_its_first_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = read_any(folder(tmp_path / "run"))
    assert capsys.readouterr().err == "tracekit: iteration 0, the first, is left out: it warms up\n"
    assert (trace.layout.dp, trace.layout.pp, trace.layout.vpp, trace.steps.tolist()) == (1, 2, 2, [1, 2])
    assert (trace.metadata["format"], trace.metadata["time_unit"]) == ("megascan", "ns")
    for step in (1, 2):
        assert rows(trace, step) == ROWS


def test_the_aggregated_trace_says_the_same(tmp_path: Path) -> None:
    trace = read_any(aggregated(tmp_path / "benchmark.json.gz"))
    assert (trace.layout.pp, trace.layout.vpp, trace.steps.tolist()) == (2, 2, [1, 2])
    assert trace.metadata["format"] == "megascan-chrome"
    assert rows(trace, 1) == ROWS


def test_complete_events_with_positions_are_read_too(tmp_path: Path) -> None:
    """Newer versions write complete events, and the position of the rank in each."""
    events = [{"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "DP1-PP0-TP0"}}]
    for pid, dp in ((0, 0), (2, 1)):
        for stage, name, microbatch, chunk, start, end in COMPUTES:
            place = {"dp_rk": dp, "pp_rk": stage, "tp_rk": 0, "microbatch": microbatch, "model_chunk": chunk}
            events.append(
                {"name": name, "ph": "X", "cname": "thread_state_running", "ts": start * 1000,
                 "dur": 1000 * (end - start), "pid": pid + stage, "tid": 0, "args": {"iteration": 7, **place}}
            )  # fmt: skip
    path = tmp_path / "benchmark.json"
    path.write_text(json.dumps(events))
    trace = read_any(path)
    assert (trace.layout.dp, trace.layout.pp, trace.steps.tolist()) == (2, 2, [7])
    ranks = trace.ops.group_by("dp_rank", "pp_rank").agg(pl.col("rank").unique()).sort("dp_rank", "pp_rank")
    assert ranks["rank"].to_list() == [[0], [1], [2], [3]]


def test_the_replay_reproduces_both_and_the_report_says_that_transfers_are_inferred(tmp_path: Path) -> None:
    for path in (folder(tmp_path / "run"), aggregated(tmp_path / "benchmark.json.gz")):
        ran = run("whatif", path, "--bubbles", "--json")
        report = json.loads(ran.out)
        assert report["trust"]["replay_error"] == pytest.approx(0.0, abs=1e-12)
        assert report["step_time_s"]["recorded"] == pytest.approx(0.156)
        assert report["coverage"]["inferred_transfers"] is True
        assert report["bubbles"]["window_s"] == pytest.approx(0.156)
        assert "inferred from the computes" in run("whatif", path).out


TRANSFERS = (
    (0, "send-forward", None, None, 11, 12),
    (1, "recv-forward", None, None, 0, 12),
    (1, "send_forward", None, None, 22, 23),
    (0, "recv_forward", None, None, 12, 23),
    (0, "send_forward", None, None, 33, 34),
    (1, "recv_forward", None, None, 24, 34),
    (1, "send_backward", None, None, 94, 95),
    (0, "recv_backward", None, None, 35, 95),
    (0, "send_backward", None, None, 115, 116),
    (1, "recv_backward", None, None, 96, 116),
    (1, "send_backward", None, None, 136, 137),
    (0, "recv_backward", None, None, 117, 137),
)
LAYERS = tuple(
    (stage, "transformer_layer", None, None, start + 2 * number, start + 2 * number + 1)
    for stage, name, _, _, start, _ in COMPUTES
    for number in range(2 + stage)
    if name == "forward"
)


def test_transfers_and_layers_are_kept_where_they_were_recorded(tmp_path: Path) -> None:
    """Each stage has two chunks; those of stage 0 have two layers each, those of stage 1 three."""
    job = load(folder(tmp_path / "run", scopes=(*COMPUTES, *TRANSFERS, *LAYERS)))
    kinds = dict(job.trace.ops.filter(pl.col("step") == 1).group_by(pl.col("kind").cast(pl.String)).len().iter_rows())
    assert kinds == {
        "forward-compute": 4, "backward-compute": 4, "forward-send": 3, "forward-recv": 3, "backward-send": 3,
        "backward-recv": 3,
    }  # fmt: skip
    assert job.trace.metadata["layers"] == [4, 6]
    assert job.trace.metadata["other_metrics"] == {"transformer-layer": 20}
    assert job.whatif().trust.replay_error == pytest.approx(0.0, abs=1e-12)


def test_transfers_that_do_not_belong_to_computes_are_inferred(tmp_path: Path) -> None:
    trace = read_any(folder(tmp_path / "run", scopes=(*COMPUTES, *TRANSFERS[:-1])))
    assert set(trace.ops["kind"].cast(pl.String)) == {"forward-compute", "backward-compute"}


def test_iterations_that_only_one_rank_has_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "run", iterations=4)
    file = path / "benchmark-data-0-pipeline-1-tensor-0.json"
    file.write_text(json.dumps([record for step in range(3) for record in records(1)]))
    report = json.loads(run("whatif", path, "--json").out)
    assert report["coverage"]["dropped"] == [{"step": 3, "dp_rank": 0}]


def damaged(path: Path, change: Any) -> Path:
    file = folder(path) / "benchmark-data-0-pipeline-1-tensor-0.json"
    content = json.loads(file.read_text())
    changed = change(content)
    file.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: json.dumps(content)[:-100], "not complete JSON"),
        (lambda content: {"a": content}, "not a list of records"),
        (
            lambda content: [*content[:12], {**content[12], "rel_ts": 0}, *content[13:]],
            "record 12: damaged: rel_ts goes back",
        ),
        (lambda content: [*content[:2], *content[3:]], "record 7: damaged: forward never ends"),
        (lambda content: [*content[:1], {"name": "forward"}, *content[1:]], "record 1: damaged"),
        (lambda content: [*content[:1], 7, *content[1:]], "record 1: damaged: 7, expected an object"),
        (
            lambda content: [*content[:12], {**content[12], "rel_ts": float("nan")}, *content[13:]],
            "pipeline-1-tensor-0.json, record 12: damaged: rel_ts is nan, expected a time",
        ),
        (
            lambda content: [*content[:12], {**content[12], "microbatch": 10**12}, *content[13:]],
            "record 12: damaged: microbatch is 1000000000000, expected a number from 0 to 999,999",
        ),
        (
            lambda content: [*content[:12], {**content[12], "model_chunk": "one"}, *content[13:]],
            "record 12: damaged: model_chunk is 'one', expected a number",
        ),
    ],
)
def test_a_damaged_file_is_one_error_that_names_the_record(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        read_any(damaged(tmp_path / "run", change))


def test_ranks_without_a_file_are_one_line(tmp_path: Path) -> None:
    path = folder(tmp_path / "run")
    first, second = sorted(path.iterdir())
    alone = "pipeline-0-tensor-0.json: one rank of MegaScan; give the folder that has the files of all ranks"
    assert alone in run("whatif", first).err.splitlines()[-1]
    third = second.rename(path / "benchmark-data-0-pipeline-2-tensor-0.json")
    gap = "no file of pipeline stage 1, such as benchmark-data-0-pipeline-1-tensor-0.json; copy the files of all ranks"
    assert gap in run("whatif", path).err.splitlines()[-1]
    third.unlink()
    ran = run("whatif", path)
    assert "run: 2 model chunks on one pipeline stage; copy the files of all ranks" in ran.err.splitlines()[-1]
    assert ran.code == 2


def test_microbatches_that_repeat_are_one_line(tmp_path: Path) -> None:
    again = tuple((*scope[:2], 0, 0, *scope[4:]) for scope in COMPUTES)
    ran = run("whatif", folder(tmp_path / "run", scopes=again))
    assert ran.code == 2
    assert "repeats microbatch 0" in ran.err.splitlines()[-1]


def test_a_folder_without_a_forward_or_a_file_is_one_error(tmp_path: Path) -> None:
    optimizers = tuple((stage, "optimizer", None, None, 1, 2) for stage in range(2))
    with pytest.raises(FormatError, match="no complete iteration with a forward; expected records of MegaScan"):
        read_any(folder(tmp_path / "run", scopes=optimizers))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="no file of MegaScan; expected benchmark-data-0-pipeline-0-tensor-0"):
        read_any(tmp_path / "empty", name="megascan")
