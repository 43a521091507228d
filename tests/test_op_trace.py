"""Op traces on disk and at the command line: what goes in comes out, and what cannot be is one clear error."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import tracekit
from tests.cases import case
from tests.handmade import slow_trace
from tests.properties import examples
from tracekit.base.errors import FormatError, TracekitError
from tracekit.cli import commands
from tracekit.trace.canonical import METADATA_KEY, read_parquet
from tracekit.trace.op import OpTrace, read_op_trace

#: Two ranks compute and meet; rank 1 takes three times as long, and alone collects garbage in step 5.
OPS = pl.DataFrame(
    {
        "step": [4, 4, 4, 4, 5, 5, 5, 5, 5],
        "rank": [0, 1, 0, 1, 0, 1, 1, 0, 1],
        "kind": ["forward", "forward", "sync", "sync", "forward", "forward", "gc", "sync", "sync"],
        "start": [0.0, 0.0, 1.0, 3.0, 0.0, 0.0, 3.0, 1.0, 8.0],
        "duration": [1.0, 3.0, 3.0, 1.0, 1.0, 3.0, 5.0, 8.0, 1.0],
        "rendezvous": [None, None, "a", "a", None, None, None, "b", "b"],
        "group": ["dp"] * 9,
        "waits_for": [[], [], [0], [1], [], [], [5], [4], [6]],
        "why": [[], [], ["stream"], ["stream"], [], [], ["stream"], ["stream"], ["stream"]],
        "host": ["n0", "n1", "n0", "n1", "n0", "n1", "n1", "n0", "n1"],
    }
)
DP = (tracekit.ProcessGroup("dp", (0, 1)),)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "ops.parquet"
    OpTrace(OPS, "two ranks", groups=DP, metadata={"gpu": "H200"}).write_parquet(path)
    return path


def whatif(*arguments: str | Path) -> str:
    ran = CliRunner(catch_exceptions=False).invoke(commands, ["whatif", *map(str, arguments)])
    assert ran.exit_code == 0
    return ran.stdout


def test_what_is_written_is_read(written: Path) -> None:
    again = read_op_trace(written)
    assert again.ops.equals(OPS)
    assert (again.name, again.groups, again.metadata) == ("two ranks", DP, {"gpu": "H200"})


def test_each_reader_refuses_the_files_of_the_other(written: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"ops\.parquet: an op trace, not a pipeline trace"):
        read_parquet(written)
    slow_trace().write_parquet(tmp_path / "pipeline.parquet")
    with pytest.raises(FormatError, match=r"pipeline\.parquet: not an op trace \(schema version 2\)"):
        read_op_trace(tmp_path / "pipeline.parquet")


def test_metadata_of_another_shape_is_damage(written: Path) -> None:
    header = json.loads(pl.read_parquet_metadata(written)[METADATA_KEY])
    for damage in ({"groups": {"dp": 3}}, {"groups": []}, {"axes": 3}, {"metadata": [1]}):
        OPS.write_parquet(written, metadata={METADATA_KEY: json.dumps(header | damage)})
        with case(damage), pytest.raises(FormatError, match=r"ops\.parquet: damaged tracekit metadata"):
            read_op_trace(written)


def test_the_report_has_the_numbers_of_the_hand(written: Path) -> None:
    """Forwards should take 2 s and gc nothing: 3 s a step. They take 4 s and 9 s.

    Without gc they take 4 s; with forwards of 1 s on both ranks 2 s and 7 s; with both, 2 s.
    """
    report = json.loads(whatif(written, "--json", "--fix", "kind=gc", "--keep", "rank=1", "--by", "rank,kind"))
    assert report["step_time_s"] == {"recorded": 6.5, "original": 6.5, "ideal": 3.0}
    assert report["slowdown"] == pytest.approx(6.5 / 3)
    assert (report["trust"]["replay_error"], report["trust"]["trustworthy"]) == (0.0, True)
    assert [asked["step_time_s"] for asked in report["questions"]] == [4.0, 6.5]
    rows = {(row["labels"], row["value"]): row["slowdown"] for row in report["by_label"]}
    assert (rows["host", "n1"], rows["host", "n0"]) == (6.5 / 3, 1.0)
    assert next(value for labels, value in rows if labels == "rank,kind") == "1,gc"
    path = {row["peer"]: row["recorded_s"] for row in report["critical_path"]}
    assert path == {"forward": 3.0, "gc": 2.5, "sync": 1.0, None: 0.0}
    assert sum(row["recorded_s"] for row in report["critical_ranks"]) == 6.5
    assert {row["kind"]: row["recorded_s"] for row in report["critical_kinds"]} == {
        "forward": 3.0,
        "gc": 2.5,
        "sync": 1.0,
    }
    found = [(cause["kind"], cause["where"]["ranks"], cause["saved_s"]) for cause in report["causes"]]
    assert found == [("python-gc", [1], 2.5), ("bad-worker", [1], 2.0)]
    assert report["verdict"]["lost_s"] == 4.5


def test_the_first_screen_has_one_yardstick_and_the_method_of_the_paper_is_asked_for(written: Path) -> None:
    assert "alike" not in whatif(written)
    assert "slowdown" not in whatif(written)
    full = whatif(written, "--full")
    assert "and all ranks alike" in full
    assert "S, rank 1 alone" in full


def test_a_member_that_was_not_recorded_is_named_and_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "ops.parquet"
    OpTrace(OPS, "job", groups=(tracekit.ProcessGroup("dp", (0, 1, 2)),)).write_parquet(path)
    trust = json.loads(whatif(path, "--json"))["trust"]
    assert not trust["trustworthy"]
    assert "rendezvous 0 of dp lacks rank 2; rendezvous 1 of dp lacks rank 2" in trust["reasons"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"waits_for": pl.Series([0] * 9)}, "column 'waits_for' has type Int64; expected a list for each op"),
        ({"why": pl.Series([["rule"]] * 9)}, "column 'why', row 0: 1 words for 0 ops in 'waits_for'"),
        ({"waits_for": pl.Series([["0"], *[[]] * 8])}, "column 'waits_for' has lists of String; expected row numbers"),
        ({"waits_for": pl.Series([[0]] * 9), "why": pl.Series([[["rule"]]] * 9)}, "column 'why' has lists of List"),
        ({"waits_for": pl.Series([[99], *[[]] * 8])}, "'before'|the ops have rows 0 to 8"),
        ({"rank": pl.Series(["a"] * 9)}, "column 'rank' has type String; expected an integer"),
        ({"group": pl.Series(["tp"] * 9)}, "its group 'tp' is not among the groups"),
    ],
)
def test_a_bad_file_is_one_error_that_names_the_job_and_the_place(
    change: dict[str, pl.Series], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "ops.parquet"
    columns = OPS.with_columns(**change)
    OpTrace(columns if "why" in change else columns.drop("why"), "odd", groups=DP).write_parquet(path)
    with pytest.raises(TracekitError, match=message) as caught:
        tracekit.load(path).whatif()
    assert str(caught.value).startswith("odd: ")


def test_streams_need_no_stated_dependencies(tmp_path: Path) -> None:
    """Stream 0 of rank 0 runs 1 s and 2 s, one after the other; its stream 1 and rank 1 run beside it."""
    ops = pl.DataFrame(
        {
            "rank": [0, 0, 0, 1],
            "stream": [0, 0, 1, 0],
            "kind": ["a", "b", "c", "a"],
            "start": [5.0, 0.0, 0.0, 0.0],
            "duration": [1.0, 2.0, 1.0, 1.0],
        }
    )
    job = tracekit.job_of(OpTrace(ops, "streams", rules=("streams",)))
    assert list(job.graph.ops.to_networkx().edges(data="why")) == [(1, 0, "stream")]
    assert job.whatif().step_times().original.tolist() == [3.0]


def test_a_rule_that_is_not_known_is_refused() -> None:
    with pytest.raises(TracekitError, match="odd: rule 'magic' is unknown; known: explicit, streams"):
        tracekit.job_of(OpTrace(OPS, "odd", rules=("magic",))).whatif()


def test_steps_that_take_no_time_are_an_error() -> None:
    with pytest.raises(TracekitError, match="idle: its steps take no time"):
        tracekit.job_of(OpTrace(OPS.with_columns(start=0.0, duration=0.0), "idle", groups=DP)).whatif(fix=["rank=1"])


def test_the_layers_of_stages_are_for_pipelines(written: Path) -> None:
    ran = CliRunner().invoke(commands, ["whatif", str(written), "--layers", "1,1"])
    assert str(ran.exception).startswith("--layers is for pipeline traces; ")


VALUES = st.one_of(
    st.none(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3), st.lists(st.integers(-2, 12), max_size=3)
)


@examples(20)
@given(st.sampled_from(OPS.columns), st.lists(VALUES, min_size=9, max_size=9), st.sampled_from(OPS.columns))
def test_any_column_ends_in_a_report_or_in_one_clear_error(name: str, values: list[object], dropped: str) -> None:
    try:
        column = pl.Series(name, values, strict=False)
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        return
    ops = OPS.with_columns(column)
    job = tracekit.job_of(OpTrace(ops.drop(dropped) if len(dropped) % 2 else ops, "any", groups=DP))
    with suppress(TracekitError):
        json.loads(job.whatif().to_json())
