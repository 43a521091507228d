"""`tracekit mcp`: the official client starts the server and asks what an agent would ask."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import tracekit
from tests.handmade import HEALTHY_STEP_S, SLOW_STEP_S, awaited, run, slow_trace

ROOT = Path(__file__).parents[1]
SLOW, HEALTHY = (str(ROOT / "sample_traces" / f"{name}.parquet") for name in ("slow_worker", "healthy"))


def ask(folder: Path, *questions: tuple[str, dict[str, Any]]) -> list[tuple[bool, Any]]:
    """For each tool and its arguments: whether it failed, and its data or the text of its error."""
    from mcp import Client, StdioServerParameters

    async def asked() -> list[tuple[bool, Any]]:
        command = StdioServerParameters(
            command=sys.executable, args=["-m", "tracekit", "mcp"], cwd=folder, env=dict(os.environ)
        )
        async with Client(command) as client:
            answers = [await client.call_tool(name, arguments) for name, arguments in questions]
        return [(one.is_error, one.content[0].text if one.is_error else one.structured_content) for one in answers]

    return awaited(asked())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    slow_trace().write_parquet(tmp_path / "slow.parquet")
    return tmp_path


@pytest.mark.slow
def test_every_question_has_the_answer_of_the_reports(folder: Path) -> None:
    """Rank 9 of the sample is slow. With worker (1,0) like its peers, a handmade step takes 11.25 s instead of 15.5."""
    run("import", SLOW, HEALTHY, "--store", folder / "jobs.store")
    dumps = folder / "dumps"
    dumps.mkdir()
    (dumps / "nccl_trace_rank_0").write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": []}))
    answers = ask(
        folder,
        ("why_slow", {"path": SLOW}),
        ("why_slow", {"path": str(folder / "jobs.store"), "job": "slow-worker"}),
        ("who", {"path": SLOW}),
        ("what_if", {"path": "slow.parquet", "selection": "worker=1,0"}),
        ("compare", {"before": SLOW, "after": HEALTHY}),
        ("hang", {"folder": str(dumps)}),
    )
    assert [failed for failed, _ in answers] == [False] * 6, answers
    why, stored, who, what_if, compared, hang = (data for _, data in answers)
    report = tracekit.load(SLOW).report.to_dict()
    assert why == json.loads(json.dumps({key: report[key] for key in why}))
    assert stored["answer"]["headline"] == why["answer"]["headline"]
    assert [one["rank"] for one in who["culprits"]] == [9]
    assert (who["drain"], who["suspects"]) == ([], ["host-0001"])
    assert what_if["step_time_s"] == pytest.approx(HEALTHY_STEP_S)
    assert what_if["saved_s"] == pytest.approx(SLOW_STEP_S - HEALTHY_STEP_S)
    assert compared | {"fix": None} == json.loads(run("compare", SLOW, HEALTHY, "--json").out)
    assert hang == json.loads(run("hang", dumps, "--json").out)


@pytest.mark.slow
def test_bad_input_is_one_line_and_the_server_goes_on(folder: Path) -> None:
    (missing, selection, fine) = ask(
        folder,
        ("why_slow", {"path": "nothing.parquet"}),
        ("what_if", {"path": "slow.parquet", "selection": "rank=99"}),
        ("who", {"path": "slow.parquet"}),
    )
    assert [missing[0], selection[0], fine[0]] == [True, True, False]
    assert "nothing.parquet" in missing[1]
    assert "99" in selection[1]
    assert "\n" not in missing[1] + selection[1]


def test_the_skill_is_installed_and_names_commands_that_exist() -> None:
    ran = run("mcp", "--skill")
    assert ran.out == (ROOT / "tracekit" / "SKILL.md").read_text()
    assert ran.out.startswith("---\nname: tracekit\ndescription: ")


def test_without_the_sdk_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    ran = run("mcp")
    assert ran.code == 2
    assert ran.message.endswith("pip install 'tracekit-analysis[mcp]'")
