"""docs/rl.md: its commands print what it shows, and its loop records what they read."""

import json
import re
import shlex
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.handmade import awaited, run
from tracekit import rl
from tracekit.collectors.record import rl_recorder as recorder

PAGE = (Path(__file__).parents[1] / "docs" / "rl.md").read_text()
LOOP, EDITS, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
#: Seconds of a decoding step: so much, and so much for each running request.
BASE_S, PER_REQUEST_S = 0.020, 0.0005
#: Of each step. The last one is the tail.
TOKENS = [*range(200, 510, 10), 1200]


def decoded(tokens):
    """When each of some requests ends that an engine starts together at 0, seconds."""
    ends, now, before = {}, 0.0, 0
    for running, number in zip(
        range(len(tokens), 0, -1), sorted(range(len(tokens)), key=tokens.__getitem__), strict=True
    ):
        now += (tokens[number] - before) * (BASE_S + PER_REQUEST_S * running)
        ends[number], before = now, tokens[number]
    return [ends[number] for number in range(len(tokens))]


def records():
    """Eight steps of two engines: they generate, then the trainer trains for 8 s and sends the weights in 0.5 s."""
    now = 0.0
    for step in range(8):
        last = now
        for engine in range(2):
            mine = TOKENS[engine::2]
            for number, (tokens, end_s) in enumerate(zip(mine, decoded(mine), strict=True)):
                yield {
                    "trajectory": f"{step}-{2 * number + engine}", "step": step, "engine": f"engine-{engine}",
                    "submit": now, "start": now, "end": now + end_s, "tokens": tokens, "tool_s": 0.0, "version": step,
                    "status": "completed",
                }  # fmt: skip
                last = max(last, now + end_s)
        for phase, begin, end in (
            ("generate", now, last),
            ("train", last, last + 8.0),
            ("sync", last + 8.0, last + 8.5),
        ):
            yield {"phase": phase, "role": "", "step": step, "start": begin, "end": end}
        now = last + 8.5


#: A step of verl, seconds.
VERL = {
    "gen": 36.0, "reward": 0.5, "old_log_prob": 3.0, "ref": 2.5, "adv": 0.1, "update_actor": 9.0, "update_weights": 0.4,
    "step": 52.0,
}  # fmt: skip


@pytest.fixture
def workplace(tmp_path):
    """What the page takes as given: a log of verl, and records of two processes."""
    timings = {f"timing_s/{name}": seconds for name, seconds in VERL.items()}
    log = [json.dumps({"step": step, "data": timings | {"actor/pg_loss": -0.08}}) for step in range(1, 11)]
    lines = [json.dumps(record) for record in records()]
    for path, content in {
        "logs/run.jsonl": log,
        "records/engines.jsonl": [line for line in lines if '"trajectory"' in line],
        "records/trainer.jsonl": [line for line in lines if '"phase"' in line],
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("\n".join(content) + "\n")
    return tmp_path


def test_every_command_prints_what_is_shown(workplace):
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        command, _, output = block.partition("\n")
        ran = run(*shlex.split(command.removeprefix("$ tracekit ")), cwd=workplace)
        assert ran.code == 0, ran.err
        assert ran.out.rstrip() == output.rstrip()


def test_every_scenario_of_the_table_has_a_price(workplace):
    scenarios = re.findall(r"^\| `([a-z].*?=?.*?)` \|", PAGE.split("## 3.")[1].split("## 4.")[0], re.MULTILINE)
    assert len(scenarios) == 5
    asked = [word for scenario in [*scenarios, "staleness=1,partial=0.9"] for word in ("--what-if", scenario)]
    ran = run("rl", workplace / "records", "--gpus", "rollout=4,trainer=4", *asked, "--json")
    assert ran.code == 0, ran.err
    assert [one["scenario"] for one in json.loads(ran.out)["what_if"] if one["step_s"]] == asked[1::2]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What the loop of the page records: 6 steps of 8 requests on an engine."""
    folder = tmp_path_factory.mktemp("loop")
    subprocess.run([sys.executable, "-W", "error", "-c", LOOP], cwd=folder, check=True, timeout=60)
    return folder / "records"


@pytest.mark.slow
def test_the_loop_records_what_the_report_reads(recorded):
    report = json.loads(run("rl", recorded, "--json").out)
    job = report["job"]
    assert (job["basis"], job["steps"], job["trajectories"], job["engines"]) == ("trajectories", 6, 48, 1)
    assert {phase["phase"] for phase in report["phases"]} == {"generate", "train", "sync"}
    assert report["step_s"] > report["generation_s"] > 0.0


@pytest.mark.slow
def test_the_lines_of_the_format_are_those_of_the_recorder(recorded):
    shown = [json.loads(line) for line in re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()]
    (file,) = recorded.iterdir()
    written = [json.loads(line) for line in file.read_text().splitlines()]
    for kind, one in zip(("trajectory", "phase"), shown, strict=True):
        first = next(record for record in written if kind in record)
        assert [(key, type(value)) for key, value in one.items()] == [(key, type(first[key])) for key in first]


def test_the_edits_of_verl_record_a_trajectory(tmp_path, monkeypatch):
    """In a stand-in for verl: an agent loop that asks for a server, decodes 5 tokens and spends 2 s in a tool."""
    monkeypatch.setattr(recorder, "_recorder", None)
    rl.record(tmp_path)
    names = {"uuid4": uuid.uuid4}
    exec(EDITS, names)  # noqa: S102  the page's own code

    class Server:
        async def _acquire_server(self, *_):
            return "server-7", None

    class Loop:
        async def run(self, *_):
            await names["generate"](Server(), "request")
            return SimpleNamespace(response_mask=[1, 1, 0, 1, 1, 1], metrics=SimpleNamespace(tool_calls=2.0))

    names["agent_loop"] = Loop()
    for validate in (True, False):
        awaited(names["_run_agent_loop"](None, {}, {"step": 4, "validate": validate}, agent_name="tools"))
    recorder._recorder.close()
    (file,) = tmp_path.iterdir()
    (record,) = map(json.loads, file.read_text().splitlines())
    expected = {"step": 4, "engine": "server-7", "tokens": 5, "tool_s": 2.0, "status": "completed"}
    assert expected.items() <= record.items()
    assert record["submit"] == record["start"] <= record["end"]
