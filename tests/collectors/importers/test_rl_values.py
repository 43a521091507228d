"""Logs of post-training as people paste them, and what their values say beside the phases."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from tests.cases import case
from tests.handmade import run
from tracekit.analysis.job.rl_job import RlJob
from tracekit.collectors.importers.rl_logs import read_rl
from tracekit.fleet.analyse import rows_of
from tracekit.trace.model import Format
from tracekit.trace.post_training import PhaseLog, part_of, run_of, trace_of

VERL = {"gen": 1030.5, "old_log_prob": 4.0, "update_actor": 10.0, "step": 1050.5}
PHASES = {"generate": 1030.5, "old-log-prob": 4.0, "train": 10.0}
RAY = "\x1b[36m(TaskRunner pid=2222)\x1b[0m "


def log_of(path: Path, text: str) -> PhaseLog:
    path.write_text(text)
    log = read_rl([path])
    assert isinstance(log, PhaseLog)
    return log


def means(log: PhaseLog) -> dict[str, float]:
    return {phase: float(seconds.mean()) for phase, seconds in log.phases.items()}


def verl(number: int, form: str = "{}:{}", joint: str = " - ", **more: float) -> str:
    """A line of verl's console, in some spacing of its keys and values."""
    timers = [form.format(f"timing_s/{name}", value) for name, value in (VERL | more).items()]
    return f"step:{number}{joint}{joint.join(['actor/loss:-0.1', *timers, 'perf/mfu:0.4'])}"


def wrapped(text: str, width: int) -> str:
    return "\n".join(text[start : start + width] for start in range(0, len(text), width))


def test_keys_and_values_are_read_in_any_spacing(tmp_path: Path) -> None:
    texts = {
        "a space": verl(1, "{}: {}"),
        "spaces": verl(1, "{}  :  {}"),
        "equals": verl(1, "{}={}"),
        "thousands": verl(1).replace("1030.5", "1,030.5").replace("1050.5", "1,050.5"),
        "numpy": verl(1, "{}:np.float64({})"),
        "dashes alone": verl(1, joint="  -  "),
        "a key a line": verl(1, "{}: {}", joint="\n - "),
        "no dashes": verl(1, "{}: {}", joint="\n"),
        "a prefix": f"pod-0 | {verl(1)}",
        "Ray": f"{RAY}{verl(1)}",
    }
    for width in (37, 60, 80, 119):
        texts[f"wrapped at {width}"] = wrapped(verl(1), width) + "\nINFO saved - nothing: 3 files"
        texts[f"wrapped by Ray at {width}"] = RAY + wrapped(verl(1), width).replace("\n", f"\n{RAY}")
    for name, text in texts.items():
        with case(name):
            log = log_of(tmp_path / "log", text + "\n")
            assert (log.steps.tolist(), log.step_s.tolist()) == ([1], [1050.5])
            assert means(log) == PHASES


def test_steps_without_their_numbers_are_counted(tmp_path: Path) -> None:
    """As of one step in notes; a key that comes again begins the next step."""
    text = "\n".join(f"timing_s/{name}: {value}" for name, value in VERL.items())
    for times, name in enumerate(("one", "two", "three"), 1):
        log = log_of(tmp_path / name, "From the run of Monday:\n" + f"{text}\n\n" * times)
        assert (log.steps.tolist(), means(log)) == (list(range(times)), PHASES)


def test_dicts_are_read_over_several_lines(tmp_path: Path) -> None:
    line = "perf 1: {'perf/train_wait_time': 30.0, 'perf/actor_train_time': 10.0, 'perf/step_time': 41.0}"
    for text in (line, line.replace(", ", ",\n "), wrapped(line, 33), line.replace("'", '"').replace('"', "'")):
        log = log_of(tmp_path / "log", f"[2026] timer.py:20 - {text}\n[2026] next line {{'perf/other_time': 3}}\n")
        assert means(log) == {"trainer-wait": 30.0, "train": 10.0}


def test_a_dict_that_does_not_end_is_read_up_to_the_next(tmp_path: Path) -> None:
    """Of SkyRL, whose dict of three values is cut off at the end of a step, and at the end of the log."""
    text = "".join(
        f"2026-01-05 10:0{step}:00.000 | INFO | tracking:log:99 - Step {step}: \n"
        f"{{'timing/generate': '{60 + step}.0',\n 'timing/sync_weights': '10.0',\n 'timing/step': '100.0',\n"
        for step in (1, 2, 3)
    )
    log = log_of(tmp_path / "log", text)
    assert (log.steps.tolist(), log.step_s.tolist()) == ([1, 2, 3], [100.0, 100.0, 100.0])
    assert log.phases["generate"].tolist() == [61.0, 62.0, 63.0]


def test_nemo_rl_is_read_aligned_and_without_bullets(tmp_path: Path) -> None:
    text = "Total step time: 1,354.29s\n  policy_training:         111.83s (31.6%)\n  exposed_generation:  105.12 s\n"
    for form in (text, text.replace("  policy", "| policy").replace(":  ", " |  "), text.replace(": ", " = ")):
        log = log_of(tmp_path / "log", form)
        assert (log.step_s.tolist(), means(log)) == ([1354.29], {"train": 111.83, "exposed-generation": 105.12})


def test_skyrl_prints_a_dict_of_text_over_many_lines(tmp_path: Path) -> None:
    """Of its timers, `policy_train` is within `train_critic_and_policy`, and the checkpoint behind the step."""
    timing = {
        "step": 100.0, "generate": 60.0, "fwd_logprobs_values_reward": 9.0, "train_critic_and_policy": 20.0,
        "policy_train": 19.0, "sync_weights": 10.0, "save_checkpoints": 45.0,
    }  # fmt: skip
    body = ",\n ".join(f"'timing/{name}': '{value:.4f}'" for name, value in timing.items())
    text = "".join(
        f"2026-01-05 10:0{step}:00.000 | INFO | tracking:log:99 - Step {step}: \n{{'reward/avg': '0.5000',\n {body}}}\n"
        for step in (1, 2, 3)
    )
    log = log_of(tmp_path / "log", text)
    assert (log.format, log.steps.tolist(), log.stale) == (Format.SKYRL, [1, 2, 3], False)
    assert means(log) == {"generate": 60, "old-log-prob": 9, "train": 20, "sync": 10}
    waits = log_of(tmp_path / "async", text.replace("timing/generate", "timing/wait_for_generation_buffer"))
    assert (means(waits)["trainer-wait"], waits.stale) == (60.0, True)


def panel(**metrics: float) -> str:
    """What rich prints, 80 columns wide, for metrics by kind and name: `time_total` is in the row `time`."""
    rows: dict[str, list[str]] = {}
    for key, value in metrics.items():
        kind, _, name = key.partition("_")
        rows.setdefault(kind, []).append(f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}")
    table = Table(show_header=False, box=None)
    for kind in sorted(rows):
        table.add_row(kind, " | ".join(rows[kind]))
    out = StringIO()
    Console(file=out, width=80).print(Panel(table, title="Metrics", expand=False))
    return out.getvalue()


def open_instruct(step: int, **timers: float) -> str:
    names = {f"time_{name}": value for name, value in timers.items()}
    return "INFO:grpo_fast:step\n" + panel(
        **names, loss_policy_avg=0.25, other_episode=512 * step, other_global_step=512 * step, other_training_step=step,
        other_learner_tokens_per_second_overall=812.5,
    )  # fmt: skip


def test_open_instruct_prints_a_panel_of_rich(tmp_path: Path) -> None:
    """Of 46 s, training takes 40, 12 of which it waits for samples; generation and weights are on other threads."""
    timers = {
        "total": 46.0, "training": 40.0, "saving": 0.0, "health_check": 1.5, "weight_sync": 8.0,
        "weight_sync_mean": 7.9, "getting_response": 912.0, "trainer_idle_waiting_for_inference": 12.0,
        "generation_idle_waiting_for_trainer": 3.0,
    }  # fmt: skip
    text = "".join(open_instruct(step, **timers) + panel(eval_scores=0.5) for step in (1, 2, 3))
    log = log_of(tmp_path / "log", text)
    assert (log.format, log.steps.tolist(), log.stale) == (Format.OPEN_INSTRUCT, [1, 2, 3], True)
    assert log.step_s.tolist() == [46.0] * 3
    assert means(log) == {"train": 28, "trainer-wait": 12, "health-check": 1.5}
    newer = log_of(tmp_path / "newer", text.replace("trainer_idle_waiting_for_inference", "trainer_waiting_for_data"))
    assert means(newer) == means(log)


def test_the_first_versions_of_open_instruct_wait_before_the_training(tmp_path: Path) -> None:
    text = "".join(open_instruct(step, total=53.0, training=40.0, trainer_idling=12.0) for step in (4, 5, 6))
    assert means(log_of(tmp_path / "log", text)) == {"train": 40, "trainer-wait": 12}


def test_validations_and_checkpoints_are_in_the_step_if_the_times_say_so(tmp_path: Path) -> None:
    """A step of 100 s: 90 s of phases, 10 s in none. Every second step validates for 30 s."""
    phases = {"gen": 70.0, "update_actor": 20.0}

    def text(step_s: float, **more: float) -> str:
        return "".join(
            verl(step, **phases, old_log_prob=0.0, step=100.0 + step_s * (step % 2), **more, testing=30.0 * (step % 2))
            + "\n"
            for step in range(1, 7)
        )

    assert "validation" not in log_of(tmp_path / "outside", text(0.0)).phases
    assert log_of(tmp_path / "inside", text(30.0)).phases["validation"].tolist() == [30.0, 0.0] * 3
    always = {"testing": 9.5, "save_checkpoint": 0.4}
    every = "".join(verl(step, **phases, old_log_prob=0.0, step=100.0, **always) + "\n" for step in range(3))
    assert means(log_of(tmp_path / "each", every))["validation"] == 9.5
    small = every.replace("testing:9.5", "testing:4.0")  # 6 s are in no phase, of which it may be none
    assert "validation" not in log_of(tmp_path / "small", small).phases
    ran = run("rl", tmp_path / "inside")
    assert "validation" in ran.out


def test_a_job_that_trains_on_stale_samples_is_sold_no_staleness(tmp_path: Path) -> None:
    idle = {"fully_async/trainer/idle_ratio": 0.07, "fully_async/rollouter/idle_ratio": 0.45}
    shares = "".join(f" - {name}:{value}" for name, value in idle.items())
    text = "".join(verl(step) + shares + "\n" for step in range(4))
    log = log_of(tmp_path / "log", text)
    assert (log.stale, means(log)["trainer-wait"]) == (True, 1030.5)
    job = RlJob.read([tmp_path / "log"])
    assert rows_of(job, "digest", "analysis")["workers"].is_empty()  # as of any run of post-training
    account = job.report
    assert account.what_if == []
    assert account.sides is not None
    assert (account.sides.trainer_idle, account.sides.rollout_idle) == pytest.approx((0.07, 0.45))
    assert account.sides.short_of_gpus == "the trainer side is short of GPUs"
    asked = run("rl", tmp_path / "log", "--what-if", "staleness=1")
    assert "staleness=1: the job trains on stale samples already" in " ".join(asked.out.split())
    for name in ("param_sync", "timing_s/param_sync"):
        synced = log_of(tmp_path / "sync", "".join(verl(step, **{name: 44.0}) + "\n" for step in range(4)))
        assert (synced.stale, means(synced)["sync"]) == (True, 44.0)


def test_tools_have_a_bound_where_the_slowest_trajectory_was_in_them(tmp_path: Path) -> None:
    """Step 2 generates for 500 s, of which the longest sampling is 200 s; in step 1 sampling takes longest."""
    form = " - timing_s/agent_loop/slowest/tool_calls:{} - timing_s/agent_loop/slowest/generate_sequences:{}"
    form += " - timing_s/agent_loop/generate_sequences/max:{} - timing_s/agent_loop/tool_calls/max:{}"
    text = "".join(
        verl(step, gen=500.0, step=1000.0) + form.format(*times) + "\n"
        for step, times in ((1, (50, 450, 450, 60)), (2, (480, 30, 200, 480)), (3, (0, 490, 490, 0)))
    )
    log = log_of(tmp_path / "log", text)
    assert log.measures["tools"][:2].tolist() == [0.0, 300.0]
    assert math.isnan(log.measures["tools"][2])
    tools = RlJob.read([tmp_path / "log"]).report.tools
    assert tools is not None
    assert (tools.steps, tools.most_s, tools.share) == ([2], 100.0, 0.1)
    bare = "".join(verl(step) + " - timing_s/agent_loop/tool_calls/mean:42.0\n" for step in range(3))
    log_of(tmp_path / "mean", bare)
    tools = RlJob.read([tmp_path / "mean"]).report.tools
    assert tools is not None
    assert (tools.share, tools.calls_s) == (None, 42.0)
    assert "the mean trajectory spends 42.00 s in tool calls" in run("rl", tmp_path / "mean").out
    again = run_of(part_of(trace_of(log, "log"), 2, 3))  # as a store keeps a window
    assert isinstance(again, PhaseLog)
    assert np.array_equal(again.measures["tools"], [300.0, math.nan], equal_nan=True)


def test_steps_that_differ_are_left_out_of_compare_and_gate_by_name(tmp_path: Path) -> None:
    """A cold step and a slow one in the run after: the others take as long as before."""
    for name, extra in (("before", {}), ("after", {0: 900.0, 7: 1800.0})):
        lines = [
            verl(step, step=1050.5 + extra.get(step, 0.0), gen=1030.5 + extra.get(step, 0.0)) for step in range(12)
        ]
        (tmp_path / name).write_text("\n".join(lines))
    compared = " ".join(run("compare", tmp_path / "before", tmp_path / "after").out.split())
    assert "Left out of after, as unlike its other steps: steps 0, 7" in compared
    assert "NO DIFFERENCE" in compared
    gated = run("gate", tmp_path / "after", "--baseline", tmp_path / "before", "--noise", "0")
    assert gated.code == 0
    assert "after: left out, as unlike the other steps: step 0 (cold) takes 1.9x" in " ".join(gated.out.split())
