"""Logs of post-training: what the frameworks print, and what is refused. Lines are as the frameworks write them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.analysis.rl.logs import lines, request, write
from tests.cases import case
from tracekit.analysis.job.rl_job import RlJob
from tracekit.base.errors import FormatError
from tracekit.collectors.importers.rl_frameworks import formats_of
from tracekit.collectors.importers.rl_logs import read_rl
from tracekit.trace.model import Format
from tracekit.trace.post_training import PhaseLog, RlTimeline, StepTime, run_of, trace_of

VERL_S = {
    "start_profile": 0.1, "agent_loop/generate_sequences/max": 29.0, "generate_sequences": 29.5, "gen": 30.0,
    "old_log_prob": 4.0, "ref": 2.0, "adv": 0.5, "update_actor": 10.0, "update_weights": 1.5, "step": 50.0,
    "testing": 99.0, "save_checkpoint": 9.0,
}  # fmt: skip
VERL_PHASES = {"generate": 30, "old-log-prob": 4, "ref-log-prob": 2, "advantage": 0.5, "train": 10, "sync": 1.5}
RAY = "\x1b[36m(TaskRunner pid=2222)\x1b[0m "


def phases_of(path: Path, text: str, written_by: Format | None = None) -> PhaseLog:
    path.write_text(text)
    log = read_rl([path], written_by)
    assert isinstance(log, PhaseLog)
    return log


def means(log: PhaseLog) -> dict[str, float]:
    return {phase: float(seconds.mean()) for phase, seconds in log.phases.items()}


def test_verl_times_what_is_within_and_outside_a_step(tmp_path: Path) -> None:
    timing = {f"timing_s/{name}": value for name, value in VERL_S.items()} | {"perf/throughput": 7.0}
    records = [{"step": step, "data": timing | {"actor/kl": float("nan")}} for step in (1, 2)]
    log = phases_of(tmp_path / "log.jsonl", "".join(f"{json.dumps(one)}\n" for one in records))
    assert (log.format, log.step_time, log.step_s.tolist()) == (Format.VERL, StepTime.SERIAL, [50.0, 50.0])
    assert means(log) == VERL_PHASES


def test_verl_on_a_console(tmp_path: Path) -> None:
    pairs = " - ".join(f"timing_s/{name}:{value}" for name, value in VERL_S.items())
    text = (
        f"{RAY}step:0 - val-core/acc:0.5\n"
        f"{RAY}step:1 - actor/pg_loss:-0.08 - {pairs} - perf/throughput:1.2\n"
        "(WorkerDict pid=1231) INFO: some other line step:9 - not a metric\n"
        f"{RAY}step:2 - {pairs.replace('30.0', 'np.float64(3.2e1)')}\n"
    )
    log = phases_of(tmp_path / "console", text)
    assert log.phases["generate"].tolist() == [30.0, 32.0]
    assert means(log) == VERL_PHASES | {"generate": 31.0}


def test_a_step_that_is_logged_twice_counts_once_as_the_last(tmp_path: Path) -> None:
    text = "".join(f"step:{step} - timing_s/gen:{gen} - timing_s/step:10.0\n" for step, gen in ((1, 2), (2, 3), (2, 5)))
    assert phases_of(tmp_path / "log", text).phases["generate"].tolist() == [2.0, 5.0]


def test_from_a_step_that_is_logged_again_only_the_last_attempt_counts(tmp_path: Path) -> None:
    """Steps 1 to 5, again from 3, again from 2: of the first attempts, steps 4 and 5 were never reached again. Lines
    that are printed twice are no attempt.
    """

    def text(attempt: int, *steps: int) -> str:
        return "".join(f"step:{step} - timing_s/gen:{attempt} - timing_s/step:10.0\n" for step in steps)

    log = phases_of(tmp_path / "log", text(1, 1, 1, 2, 3, 4, 5) + text(2, 3, 4) + text(3, 2, 3))
    assert log.steps.tolist() == [1, 2, 3]
    assert log.phases["generate"].tolist() == [1, 3, 3]
    assert log.restarts == (3, 2)
    job = RlJob.read([tmp_path / "log"])
    assert job.report.restarts == [3, 2]
    remarks = {remark.name: remark.words for remark in job.report.remarks}
    assert remarks["Restart"] == "steps 2-3 logged again: from there on, the last attempt counts"
    once = phases_of(tmp_path / "once", text(1, 1, 1, 2) + text(2, 3))
    assert (once.restarts, trace_of(once, "once").metadata.keys()) == ((), {"post_training"})


def test_the_two_records_of_slime_are_not_logged_again_but_an_attempt_is(tmp_path: Path) -> None:
    def text(step: int, rollout: float) -> str:
        trainer = {"perf/train_wait_time": rollout, "perf/train_time": 2.0, "perf/step_time": rollout + 2.0}
        return f"perf {step}: {{'perf/rollout_time': {rollout}}}\nperf {step}: {trainer}\n"

    log = phases_of(tmp_path / "log", text(0, 3.0) + text(1, 4.0) + text(2, 5.0) + text(1, 6.0))
    assert (log.steps.tolist(), log.step_s.tolist(), log.restarts) == ([0, 1], [5.0, 8.0], (1,))


def test_openrlhf_adds_up_or_reads_a_clock(tmp_path: Path) -> None:
    parts = {"make_experience": 3.0, "ppo_train": 8.0, "broadcast": 1.0, "generation": 30.0}
    for name, step, star, expected in (("sum", 42.0, "✨ ", StepTime.SUMMED), ("clock", 31.5, "", StepTime.OVERLAPPED)):
        timing = {f"timing/{key}": value for key, value in parts.items()} | {"timing/step_total": step, "kl": 0.1}
        line = f"INFO 01-05 10:00:00 ppo_trainer.py:547] {star}Global step 7: {timing}\n"
        log = phases_of(tmp_path / name, line.replace("30.0", "np.float64(30.0)"))
        assert (log.step_time, log.step_s.tolist()) == (expected, [step])
        assert means(log) == {"generate": 30, "experience": 3, "train": 8, "sync": 1}


def test_openrlhf_without_some_of_its_timers_overlaps_only_if_those_left_exceed_the_step(tmp_path: Path) -> None:
    """A step of 42 s: 30 s of generation and 8 s of training fit into it, with 20 s of training they overlap."""
    for train_s, expected, unaccounted_s, said in (
        (8.0, StepTime.SERIAL, 4.0, False),
        (20.0, StepTime.OVERLAPPED, 12.0, True),
    ):
        timing = {"timing/generation": 30.0, "timing/ppo_train": train_s, "timing/step_total": 42.0}
        assert phases_of(tmp_path / "log", f"Global step 7: {timing}\n").step_time is expected
        report = RlJob.read([tmp_path / "log"]).report
        assert report.unaccounted_s == unaccounted_s
        remarks = {remark.name: remark.words for remark in report.remarks}
        assert ("phases overlap" in remarks["Step"]) is said


def test_slime_reports_a_step_in_two_records_and_waits_for_its_rollout(tmp_path: Path) -> None:
    def text(wait: float) -> str:
        trainer = {
            "train_wait": wait, "train": 12.0, "log_probs": 3.0, "actor_train": 9.0, "update_weights": 1.0,
            "data_preprocess": 0.5, "step": wait + 12.0,
        }  # fmt: skip
        timing = {f"perf/{key}_time": value for key, value in trainer.items()} | {"perf/wait_time_ratio": 0.5}
        rollout = {"perf/rollout_time": 30.0, "perf/request/queue_time/mean": 9.0}
        return f"[2026] rollout.py:2 - perf 0: {rollout}\n[2026] train.py:4 - perf 0: {timing}\nperf 1: {rollout}\n"

    log = phases_of(tmp_path / "sync", text(34.0))
    assert (log.step_time, log.step_s.tolist()) == (StepTime.SERIAL, [46.0])
    phases = {"generate": 30, "old-log-prob": 3, "train": 9, "sync": 1, "data-preprocess": 0.5}
    assert means(log) == phases | {"trainer-wait": 2.5}  # of the 34 s, beyond rollout, update and data
    assert phases_of(tmp_path / "async", text(20.0)).step_time is StepTime.OVERLAPPED
    trainer_alone = text(34.0).splitlines()[1].replace("perf 0", "perf 2")
    assert means(phases_of(tmp_path / "cut", text(34.0) + trainer_alone))["generate"] == 30  # step 2 is left out


def test_nemo_rl_prints_a_block_a_step(tmp_path: Path) -> None:
    block = (
        "📊 Training Results:\n  • Loss: 0.1032\n\n⏱️  Timing:\n  • Total step time: 46.00s\n"
        "  • {}: 33.31s (72.4%)\n  • policy_training: 8.63s (18.8%)\n  • prepare_for_generation/total: 0.30s (0.7%)\n"
        "  • prepare_for_generation/transfer_and_update_weights: 0.24s (0.5%)\n\n"
    )
    text = "".join(f"{'=' * 9} Step {step}/2 {'=' * 9}\n{block.format('generation')}" for step in (1, 2))
    log = phases_of(tmp_path / "log", text)
    assert log.step_s.tolist() == [46.0, 46.0]
    assert means(log) == pytest.approx({"generate": 33.31, "train": 8.63, "sync": 0.3})
    validated = text.replace("⏱️", "  • Total validation time: 6.00s\n⏱️", 1).replace("46.00s", "52.00s", 1)
    log = phases_of(tmp_path / "validated", validated)
    assert (log.step_s.tolist(), log.phases["validation"].tolist()) == ([52.0, 46.0], [6.0, 0.0])
    alone = phases_of(tmp_path / "async", block.format("exposed_generation"))
    assert set(alone.phases) == {"exposed-generation", "train", "sync"}


def test_nemo_rl_that_prints_a_step_again_was_restarted_and_an_epoch_goes_on(tmp_path: Path) -> None:
    def text(*heads: str) -> str:
        """Each step takes 10 s longer than the one before."""
        took_s, said = 40.0, ""
        for head in heads:
            said += f"{'=' * 25} {head} {'=' * 25}\n"
            if head.startswith("Step"):
                took_s += 10
                said += f"  • Total step time: {took_s:.2f}s\n  • generation: 30.00s (60.0%)\n\n"
        return said

    for name, heads, numbers, step_s, restarts in (
        ("one", ("Epoch 1/2", "Step 1/3", "Step 2/3", "Epoch 2/2", "Step 1/3"), [0, 1, 2], [50, 60, 70], ()),
        ("again", ("Epoch 1/1", "Step 1/9", "Step 2/9", "Step 3/9", "Epoch 1/1", "Step 2/9", "Step 3/9"),
         [1, 2, 3], [50, 80, 90], (2,)),
        ("asynchronous", ("Step 5/9", "Step 6/9", "Step 6/9", "Step 7/9"), [5, 6, 7], [50, 70, 80], (6,)),
    ):  # fmt: skip
        with case(name):
            log = phases_of(tmp_path / name, text(*heads))
            assert (log.steps.tolist(), log.step_s.tolist(), log.restarts) == (numbers, step_s, restarts)


def test_trajectories_keep_the_order_of_submission(tmp_path: Path) -> None:
    timeline = read_rl([write(tmp_path / "run.jsonl", reversed(lines()))])
    assert isinstance(timeline, RlTimeline)
    assert timeline.trajectories is not None
    assert timeline.trajectories.tokens[:6].tolist() == [2, 4, 8, 2, 4, 8]
    names = [f"0-{number}" for number in (10, 9, 2)]
    same = [{"trajectory": name, "step": 0, "start": 0, "end": 1, "tokens": len(name)} for name in names]
    ordered = read_rl([write(tmp_path / "same.jsonl", same)])
    assert isinstance(ordered, RlTimeline)
    assert ordered.trajectories is not None
    assert ordered.trajectories.tokens.tolist() == [3, 3, 4]
    assert (ordered.trajectories.version == -1).all()


def test_several_files_are_one_run(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{part}.jsonl", lines()[part::2]) for part in (0, 1)]
    whole, parts = read_rl([write(tmp_path / "all.jsonl", lines())]), read_rl(paths)
    assert isinstance(whole, RlTimeline)
    assert isinstance(parts, RlTimeline)
    assert whole.trajectories is not None
    assert parts.trajectories is not None
    for name in whole.trajectories.__struct_fields__:
        assert np.array_equal(getattr(whole.trajectories, name), getattr(parts.trajectories, name))


def test_a_trajectory_that_is_decoded_twice_at_once_is_of_two_runs(tmp_path: Path) -> None:
    """A part of a trajectory, aborted after 2 s, and its second part are one run; so is a copy of a file."""
    parts = [request("part", 0, 0.0, 2.0, 4), request("part", 0, 2.0, 5.0, 4)]
    assert isinstance(read_rl([write(tmp_path / f"{name}.jsonl", [*lines(), *parts]) for name in "ab"]), RlTimeline)
    other = [{key: value + 0.5 if key in ("submit", "start", "end") else value for key, value in line.items()}
             for line in lines()]  # fmt: skip
    with pytest.raises(FormatError, match=r"'0-0' of step 0 starts at 0\.5 s, while one .* 2\.0 s; names are unique"):
        read_rl([write(tmp_path / "a.jsonl", lines()), write(tmp_path / "other.jsonl", other)])


def test_a_last_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    cut = '{"step": 1, "data": {"timing_s/step": 3}}\n{"step": 2, "da'
    assert phases_of(tmp_path / "verl.jsonl", cut).step_s.tolist() == [3.0]
    path = write(tmp_path / "run.jsonl", lines())
    path.write_text(path.read_text() + '{"trajectory": "4-0", "st')
    timeline = read_rl([path])
    assert isinstance(timeline, RlTimeline)
    assert len(timeline.phases.step) == 16


def test_steps_keep_their_numbers_in_order_and_those_without_a_time_are_named(tmp_path: Path) -> None:
    """Step 9 is logged first, step 7 without the generation, step 8 without the step, and step 6 not at all."""
    timers = [(9, "gen:6 - timing_s/step:9"), (5, "gen:2 - timing_s/step:5"), (7, "step:3"), (8, "gen:4")]
    log = phases_of(tmp_path / "verl.log", "".join(f"step:{step} - timing_s/{times}\n" for step, times in timers))
    assert log.steps.tolist() == [5, 9]
    assert log.step_s.tolist() == [5.0, 9.0]
    assert log.phases["generate"].tolist() == [2.0, 6.0]
    assert log.left_out == (6, 7, 8)
    again = run_of(trace_of(log, "job"))
    assert isinstance(again, PhaseLog)
    assert (again.steps.tolist(), again.left_out) == ([5, 9], (6, 7, 8))


def test_a_step_whose_record_is_broken_is_a_gap_at_the_usual_distance(tmp_path: Path) -> None:
    """A console logs every tenth step after the first; the line of step 30 is cut before its times."""
    times = "timing_s/gen:6 - timing_s/step:9"
    logged = [f"step:{step} - {times}" for step in (1, 10, 20, 30, 40, 50)]
    logged[3] = "step:30 - actor/pg_loss: garbage"
    log = phases_of(tmp_path / "verl.log", "\n".join(logged))
    assert (log.steps.tolist(), log.left_out) == ([1, 10, 20, 40, 50], (30,))
    apart = phases_of(tmp_path / "parts.log", "\n".join(f"step:{step} - {times}" for step in (0, 1, 2, 1 << 30)))
    assert apart.left_out == ()  # a part of the run that was not given


def test_a_restart_that_repeats_steps_of_slime_keeps_both_records_of_each(tmp_path: Path) -> None:
    """Step 1 is cut after its rollout, and done again with 7 s; other lines that look like steps have no timers."""

    def step(number: int, rollout: int) -> list[str]:
        return [
            f"perf {number}: {{'perf/rollout_time': {rollout}}}\n",
            f"perf {number}: {{'perf/train_wait_time': {rollout}, 'perf/step_time': {rollout + 2}}}\n",
            f"perf {number + 5}: {{'rollout/length': 9}}\n",
        ]

    log = phases_of(tmp_path / "slime.log", "".join([*step(0, 4), step(1, 5)[0], *step(0, 6), *step(1, 7)]))
    assert log.phases["generate"].tolist() == [6.0, 7.0]
    assert log.step_s.tolist() == [8.0, 9.0]
    assert log.left_out == ()


def test_a_line_that_is_there_twice_is_one_request(tmp_path: Path) -> None:
    once, twice = (read_rl([write(tmp_path / f"{n}.jsonl", lines() * n)]) for n in (1, 2))
    assert isinstance(once, RlTimeline)
    assert isinstance(twice, RlTimeline)
    assert once.trajectories is not None
    assert twice.trajectories is not None
    assert twice.trajectories.end.tolist() == once.trajectories.end.tolist()


def test_timers_that_do_not_count_seconds_contradict_the_clock_of_the_console_or_the_rate_of_tokens(
    tmp_path: Path,
) -> None:
    """Steps of 40 s, printed every 41 s; 100,000 tokens of 16 GPUs, 156 a second each."""

    def openrlhf(unit: int, clock: str = "01-05 10:{:02}:{:02}") -> str:
        return "".join(
            f"INFO {clock.format(*divmod(41 * step, 60))} ppo_trainer.py:1] Global step {step}:"
            f" {{'timing/generation': {40 * unit}, 'timing/step_total': {40 * unit}}}\n"
            for step in range(4)
        )

    def verl(unit: int) -> str:
        return "".join(
            f"step:{step} - timing_s/gen:{30 * unit} - timing_s/step:{40 * unit}"
            f" - perf/throughput:156.25 - perf/total_num_tokens:100000\n"
            for step in range(4)
        )

    for name, text, words in (
        ("printed", openrlhf(1000), "3 steps take 120,000 s, but were printed within 123 s"),
        ("seconds", openrlhf(1), None),
        ("late", openrlhf(9), None),
        ("no clock", openrlhf(1000, "{}{}"), None),
        ("no time", openrlhf(1000, "01-45 10:{:02}:{:02}"), None),
        ("tokens", verl(1000), "156 tokens a second of each GPU are more than all 100,000 of a step"),
        ("tokens of seconds", verl(1), None),
    ):
        with case(name):
            log = phases_of(tmp_path / "log", text)
            assert log.contradiction == (words and f"{words}: the timers do not count seconds")
            report = RlJob.read([tmp_path / "log"]).report
            assert report.verdict.kind == ("contradiction" if words else "phases")


class Trap:
    """Opens a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("unpickled", "w")


def test_what_is_no_log_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = '{"trajectory": "0-0", "step": 0, "start": 0, "end": 1}'
    backwards = '{"trajectory": "3-7", "step": 3, "engine": "a", "start": 5.0, "end": 4.5, "tokens": 3}'
    for name, content, words in (
        ("empty", b"\n \n", "an empty file"),
        ("pickle", pickle.dumps(Trap()), "a pickle"),
        ("torch", b"PK\x03\x04data", "a pickle"),
        ("binary", b"log\0log", "not text"),
        ("prose", b"Epoch 1: loss 0.3\n", "prose, line 1: 'Epoch 1: loss 0.3'; no line is as verl"),
        ("no times", b"step:1 - actor/pg_loss:0.1\n", "no line is as verl"),
        ("backwards", backwards.encode(), "trajectory '3-7' of step 3 ends at 4.5 s, before it starts"),
        ("damaged", f"{good}\n{{x\n{good}\n".encode(), "damaged, line 2: "),
        ("no step", f'{good}\n{{"trajectory": "1", "start": 0, "end": 1}}\n'.encode(), "no step, line 2: "),
        ("milliseconds", good.replace('start": 0', 'start": 1.7e12').encode(), "<= 100000000000.0 - at `$.start`"),
        ("negative", f'{good[:-1]}, "tokens": -1}}'.encode(), "negative, line 1: "),
        ("neither", f'{good}\n{{"step": 2, "start": 0, "end": 1}}\n'.encode(), "neither a trajectory nor a phase"),
        ("endless", b"step:1 - timing_s/gen:inf - timing_s/step:9.0\n", "gen took inf s"),
        (
            "cut",
            b'{"step": 1, "data": {"timing_s/step": 3}}\n{"step": 2, "da\n{"step": 3}\n',
            'cut, line 2: \'{"step": 2, ',
        ),
        ("no whole step", b'{"step": 1, "data": {"timing_s/step": 0}}\n', "no whole step"),
    ):
        Path(name).write_bytes(content)
        with case(name), pytest.raises(FormatError) as raised:
            read_rl([Path(name)])
        assert name in str(raised.value) or name == "neither"
        assert words in str(raised.value)
    assert not Path("unpickled").exists()
    with pytest.raises(FormatError, match="nowhere: no such file"):
        read_rl([Path("nowhere")])
    Path("verl").write_text("step:1 - timing_s/step:9.0\n")
    with pytest.raises(FormatError, match="logs of trajectories, verl; give the files of one run"):
        read_rl([Path("verl"), write(Path("run.jsonl"), lines())])
    with pytest.raises(FormatError, match="slime logs no whole step here"):
        read_rl([Path("verl")], Format.SLIME)


def test_a_line_without_its_step_is_of_a_framework_by_the_time_of_a_whole_step_alone() -> None:
    for line, formats in {
        "timing_s/gen:30.0 - timing_s/step:46.0": {Format.VERL},
        "timing_s/gen:30.0 - timing_s/update_actor:9.0": set(),
        "{'timing/make_experience': 3.0, 'timing/step_total': 4.0}": {Format.OPENRLHF},
        "{'timing/make_experience': 3.0, 'timing/ppo_train': 1.0}": set(),
    }.items():
        with case(line):
            assert formats_of(line.encode(), [(1, line)]) == formats
