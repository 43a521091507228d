"""What every command prints with --json fits the schema that is shipped with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from jsonschema import Draft202012Validator

from judges.hangsim import Fault, HangJob, dumps
from judges.hangsim import run as simulated
from judges.hangsim import write as write_dumps
from tests.analysis.metrics.fleet import BEGAN, fleet
from tests.analysis.metrics.fleet import Fault as Slowed
from tests.analysis.plans.simulator import draw
from tests.bill.test_run import restarted
from tests.fleet.few_jobs import study_here, write_jobs
from tests.handmade import run
from tests.outputs import OUTPUTS, SHIPPED, json_schema
from tests.test_history import stored, window
from tracekit.base.errors import ExitCode
from tracekit.cli import commands

SAMPLES = Path(__file__).parents[1] / "sample_traces"
SLOW, HEALTHY = SAMPLES / "slow_worker.parquet", SAMPLES / "healthy.parquet"
#: Commands that print a report, whose schema is another one: tests/test_report.py.
REPORTS = {"whatif", "attach", "rl"}


def _bill(folder: Path) -> list[object]:
    restarted(folder / "run")
    return ["bill", folder / "run", "--gpu-hour", "2"]


def _history(folder: Path) -> list[object]:
    stored(folder, lambda number: window(number, 1.2 if number >= 7 else 1.0))
    return ["culprits", "--history", "--store", folder / "jobs.store", "--format", "json"]


def _experts(folder: Path) -> list[object]:
    (folder / "loads.jsonl").write_text('{"step": 0, "layer": 0, "tokens_per_expert": [8, 1, 1, 1]}\n')
    return ["experts", folder / "loads.jsonl", "--ranks", "2", "--replicas", "6"]


def _hang(folder: Path) -> list[object]:
    job, faults = HangJob(4, 2, 2), [Fault("gpu-error", 6, 29, lag=4)]
    write_dumps(folder / "dumps", dumps(job, faults, simulated(job, faults)))
    return ["hang", folder / "dumps"]


def _optimize(folder: Path) -> list[object]:
    (folder / "model.json").write_text(json.dumps(draw(1, layers=6, stages=2, memory=1.2)))
    return ["optimize", "--model", folder / "model.json"]


def _runs(folder: Path) -> list[object]:
    (folder / "runs.csv").write_text("microbatches,step_time_s\n24,5.17\n288,55.1\n")
    return ["optimize", "--runs", folder / "runs.csv", "--microbatches", "48"]


def _study(folder: Path) -> Path:
    if not (folder / "study").exists():
        study_here(write_jobs(folder / "traces", 2), out=folder / "study")
    return folder / "study"


def _sql(folder: Path) -> list[object]:
    assert run("import", SLOW, "--store", folder / "jobs").code == 0
    return ["store", "sql", "select * from jobs", "--store", folder / "jobs"]


def _metrics(folder: Path) -> Path:
    fleet(1, Slowed(0, "compute", 0.3, 300, 540), hosts=8, devices=1).write_parquet(folder / "metrics.parquet")
    return folder / "metrics.parquet"


#: Command -> the words of one that prints something of each part, and how it ends.
CASES: dict[str, tuple[Callable[[Path], list[object]], ExitCode]] = {
    "bill": (_bill, ExitCode.DONE),
    "collect": (lambda folder: ["collect", "--no-store", "--out", folder / "job.parquet"], ExitCode.DONE),
    "compare": (lambda _: ["compare", HEALTHY, SLOW], ExitCode.DONE),
    "culprits": (lambda _: ["culprits", SLOW, "--format", "json", "--suspects"], ExitCode.DONE),
    "culprits --history": (_history, ExitCode.DONE),
    "doctor": (lambda folder: ["doctor", "--python", folder / "no-python"], ExitCode.CONDITION),
    "experts": (_experts, ExitCode.DONE),
    "fleet compare": (lambda folder: ["fleet", "compare", _study(folder), _study(folder)], ExitCode.DONE),
    "fleet report": (lambda folder: ["fleet", "report", _study(folder)], ExitCode.DONE),
    "gate": (lambda _: ["gate", SLOW, "--baseline", HEALTHY, "--noise", "1%"], ExitCode.CONDITION),
    "hang": (_hang, ExitCode.CONDITION),
    "optimize": (_optimize, ExitCode.DONE),
    "optimize --runs": (_runs, ExitCode.DONE),
    "metrics doctor": (lambda folder: ["metrics", "doctor", _metrics(folder)], ExitCode.DONE),
    "metrics scan": (lambda folder: ["metrics", "scan", _metrics(folder)], ExitCode.DONE),
    "metrics test": (
        lambda folder: [
            *("metrics", "test", _metrics(folder), "--suspect"),
            f"node-00:part=compute,excess=0.3,from={BEGAN + 300},to={BEGAN + 540}",
        ],
        ExitCode.DONE,
    ),
    "store sql": (_sql, ExitCode.DONE),
}


def problems(content: Any, command: str) -> list[str]:
    """Where `content` differs from the shipped definition; a key that the schema lacks counts, too."""
    schema = json.loads(SHIPPED.read_text("utf-8")) | {"$ref": f"#/$defs/{command}"}
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    return [f"{error.json_path}: {error.message:.200}" for error in Draft202012Validator(schema).iter_errors(content)]


def _with_json(group: click.Group, before: str = "") -> Iterator[str]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from _with_json(command, f"{before}{name} ")
        elif command is not None:
            for option in command.params:
                if "--json" in option.opts or "json" in getattr(option.type, "choices", ()):
                    yield f"{before}{name}"


def test_every_command_that_prints_json_is_here() -> None:
    assert {*_with_json(commands)} == {name.partition(" --")[0] for name in CASES} | REPORTS
    assert CASES.keys() == OUTPUTS.keys()


def test_the_shipped_schema_is_that_of_the_code() -> None:
    """After a change of the types: `python -m tests.outputs`."""
    assert json.loads(SHIPPED.read_text("utf-8")) == json.loads(json.dumps(json_schema()))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(("culprits --", "fleet"))) for name in CASES]
)
def test_what_a_command_prints_fits_its_schema(name: str, tmp_path: Path) -> None:
    words, code = CASES[name]
    ending = ["--", "true"] if name == "collect" else []
    ran = run(*words(tmp_path), *([] if "culprits" in name else ["--json"]), *ending)
    assert ran.code == code, ran.err
    content = json.loads(ran.out)
    assert content
    assert problems(content, name) == []
