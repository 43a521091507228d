"""Reports on runs whose times were worked out by hand, and on simulated ones with their truth."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from judges.rlsim import PLANTED, alternatives, draw, generate, losses, record, step_s
from tests.analysis.rl.logs import GENERATION_S, STEP_S, lines, request, write
from tracekit.analysis.job.rl_job import RlJob
from tracekit.analysis.rl.account import RlAccount, first_line
from tracekit.analysis.rl.rl_run import Gpus, LoggedRun, Loop, Scenario
from tracekit.analysis.rl.timed import TimedRun
from tracekit.base.errors import FormatError, SelectionError
from tracekit.collectors.importers.rl_logs import read_rl
from tracekit.trace.model import Format
from tracekit.trace.post_training import PhaseLog, RlTimeline, StepTime


def analyse(path: Path, *scenarios: str, gpus: str | None = None, slots: int | None = None) -> RlAccount:
    timeline = read_rl([path])
    assert isinstance(timeline, RlTimeline)
    known = None if gpus is None else Gpus.parse(gpus)
    return TimedRun(timeline, known, slots).account([Scenario.parse(text) for text in scenarios])


def prices(report: RlAccount) -> dict[str, float | None]:
    return {one.scenario: one.step_s for one in report.what_if}


def test_the_account_of_a_step_by_hand(tmp_path: Path) -> None:
    report = analyse(write(tmp_path / "run.jsonl", lines()), slots=8)
    assert (report.step_s, report.generation_s, report.trainer_wait_s) == (STEP_S, GENERATION_S, 6.0)
    assert {one.phase: one.seconds for one in report.phases} == {
        "generate": 5.5,
        "train": 4.0,
        "sync": 1.0,
        "reward": 0.5,
    }
    assert (report.unaccounted_s, report.flagged, report.staleness) == (0.0, None, 0)
    assert report.generation is not None
    assert report.generation.base_s == pytest.approx(0.25)
    assert report.generation.per_request_s == pytest.approx(0.25)
    assert report.generation.error == pytest.approx(0.0, abs=1e-9)


def test_phases_of_several_ranks_count_once_and_an_evaluation_is_no_training(tmp_path: Path) -> None:
    more = [line | {"end": line["end"] - 0.5} for line in lines() if line.get("phase") == "train"]
    more += [{"phase": "testing", "step": step, "start": 11.0 * step + 1, "end": 11.0 * step + 2} for step in range(4)]
    report = analyse(write(tmp_path / "run.jsonl", [*lines(), *more]), "staleness=1")
    assert {one.phase: one.seconds for one in report.phases} == {
        "generate": 5.5, "train": 4.0, "sync": 1.0, "testing": 1.0, "reward": 0.5,
    }  # fmt: skip
    assert (report.unaccounted_s, report.trainer_wait_s, report.replayed_s) == (0.0, 6.0, pytest.approx(11.0))
    assert prices(report) == pytest.approx({"staleness=1": 5.5})


def test_losses_by_hand(tmp_path: Path) -> None:
    found = {one.loss: one.lost_s for one in analyse(write(tmp_path / "run.jsonl", lines())).losses}
    # Nothing is longer than the 95th percentile of three requests, and there is one engine.
    assert found == pytest.approx(
        {"queueing": 0.0, "tail": 0.0, "engines": 0.0, "tools": 0.0, "reward": 0.5, "sync": 1.0}, abs=1e-6
    )


def _rounds(path: Path, requests: Sequence[tuple[int, float]], engines: int = 4) -> Path:
    """Six steps in which every engine has requests of that many tokens; a token takes 20 ms, on the last engine longer
    by the factor. Training takes 8 s, the sync 0.5 s.
    """
    rows, begins = list[dict[str, Any]](), 0.0
    for step in range(6):
        ends = begins
        for engine, (number, (tokens, factor)) in itertools.product(range(engines), enumerate(requests)):
            end = begins + 0.02 * tokens * (factor if engine == engines - 1 else 1)
            rows.append(request(f"{engine}-{number}", step, begins, end, tokens, engine=f"engine-{engine}"))
            ends = max(ends, end)
        spans = (("generate", begins, ends), ("train", ends, ends + 8), ("sync", ends + 8, ends + 8.5))
        rows += [{"phase": name, "step": step, "start": start, "end": end} for name, start, end in spans]
        begins = ends + 8.5
    return write(path, rows)


def test_a_slow_engine_is_named_and_one_with_more_work_is_not_slow(tmp_path: Path) -> None:
    slow = RlJob.read([_rounds(tmp_path / "slow.jsonl", [(400, 1.6), (410, 1.6), (420, 1.6)])]).report.answer
    assert slow.who is not None
    assert slow.who.startswith("engine-3, in every step")
    assert slow.why == "engines decode at 0.625 to 1 times the median speed, and all have as many tokens"


def test_prices_by_hand(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", lines())
    report = analyse(
        path, "staleness=1", "partial=0.6", "engines=3", "split=1:4", "staleness=1,generate=20", "train=1",
        gpus="rollout=1,trainer=2",
    )  # fmt: skip
    assert prices(report) == pytest.approx(
        {
            "staleness=1": 5.5,  # generation and its trainer (4 + 1 s) side by side
            "partial=0.6": 9.0,  # each generation ends with the second request, after 3.5 s
            "engines=3": 9.5,  # 8 tokens alone take 4 s
            "split=1:4": 9.0,  # twice the GPUs train in 2 s
            "staleness=1,generate=20": 20.0,
            "train=1": 8.0,
        },
        rel=1e-6,
    )
    ages = {one.scenario: one.oldest_sample_steps for one in report.what_if}
    assert ages == {"staleness=1": 1, "partial=0.6": 1, "engines=3": None, "split=1:4": None,
                    "staleness=1,generate=20": 1, "train=1": None}  # fmt: skip
    assert first_line(report)[1].startswith("the weight sync costs 9% of the step; one step of staleness saves 50%,")


def test_a_loop_by_hand() -> None:
    two, none = np.full(4, 2.0), np.zeros(4)
    loop = Loop(two, none, two + 1, none, none, none, 0)
    assert loop.sync_ends().tolist() == [5.0, 10.0, 15.0, 20.0]
    # One step off: the trainer (3 s) is the slower one.
    assert loop.replace(staleness=1).sync_ends().tolist() == [5.0, 8.0, 11.0, 14.0]
    # A generation of 7 s is the slower one; that a training starts 1 s late does not matter then.
    slow = loop.replace(staleness=1, generate=np.full(4, 7.0), train_late=np.ones(4))
    assert slow.sync_ends().tolist() == [11.0, 18.0, 25.0, 32.0]


@pytest.mark.parametrize("planted", PLANTED)
def test_a_drawn_job_has_the_losses_and_prices_of_its_simulation(tmp_path: Path, planted: str) -> None:
    job = draw(planted, 1, staleness=PLANTED.index(planted) % 2)
    record(job, tmp_path / "run.jsonl")
    truth, alternative, step = losses(job), alternatives(job), step_s(job, generate(job))
    gpus = f"rollout={len(job.speeds)},trainer={len(job.speeds)}"
    report = analyse(tmp_path / "run.jsonl", *alternative, gpus=gpus, slots=job.slots)
    assert report.step_s == pytest.approx(step, rel=1e-4)
    assert report.staleness == job.staleness
    assert report.leading == (None if planted == "none" else planted)
    assert {one.loss: one.lost_s for one in report.losses} == pytest.approx(truth, abs=0.05 * step)
    assert prices(report) == pytest.approx(alternative, rel=0.05)
    more_engines = f"engines={len(job.speeds) + 2}"  # which leaves samples as old as they are
    assert {one.scenario: one.oldest_sample_steps for one in report.what_if}[more_engines] is None


def test_contradictions_are_flagged_and_not_priced(tmp_path: Path) -> None:
    def off(by: float) -> list[dict[str, Any]]:
        """A second engine with the requests of the first, on a clock that is off."""
        both = lines()
        for line in lines():
            if "trajectory" in line:
                moved = {key: line[key] + by for key in ("submit", "start", "end")}
                both.append(line | moved | {"trajectory": f"b{line['trajectory']}", "engine": "b"})
        return both

    short = [line for line in off(2.5) if line.get("engine") != "b" or line["tokens"] == 2]
    longer = [line | ({"end": line["end"] + 5} if line.get("phase") == "train" else {}) for line in lines()]
    for name, written, words in (
        ("behind", off(-2.0), "trajectories of b lie 2.00 s outside"),
        ("ahead", off(3.0), "trajectories of b lie 3.00 s outside"),
        ("ahead within the generation", short, "trajectories of b lie 2.50 s outside"),
        ("phases", longer, "more than the step itself"),
    ):
        report = analyse(write(tmp_path / name, written), "staleness=1")
        assert report.flagged is not None, name
        assert words in report.flagged
        assert prices(report) == {"staleness=1": None}
        assert first_line(report)[0] == "contradiction"
    assert analyse(write(tmp_path / "right", off(0.0)), "staleness=1").flagged is None


def test_an_engine_that_is_replayed_wrongly_casts_doubt_though_generations_end_with_another(tmp_path: Path) -> None:
    every = [line for line in lines() if "phase" in line]
    every += [
        request(name, step, 11.0 * step, 11.0 * step + 5.5, 8, engine=name) for step in range(4) for name in "abc"
    ]
    right = analyse(write(tmp_path / "right.jsonl", every))
    assert right.generation is not None
    assert right.generation.engine_error == pytest.approx(0.0, abs=1e-9)
    assert right.doubt is None
    first_of_c = next(line for line in every if line.get("engine") == "c")
    first_of_c["tokens"] = 10**9  # c seems that much faster, so that its other requests are replayed in no time
    wrong = analyse(write(tmp_path / "wrong.jsonl", every), "staleness=1", "partial=0.9")
    assert wrong.replayed_s == pytest.approx(wrong.step_s, rel=1e-6)
    assert wrong.doubt == (
        "the replayed step is off by 0.0%, its generation by 0.0%, engines' requests by up to 100.0%, more than 5%"
    )
    assert prices(wrong) == {"staleness=1": None, "partial=0.9": None}
    assert {one.assumes for one in wrong.what_if} == {wrong.doubt}
    assert wrong.generation is not None
    assert wrong.generation.engine_error == pytest.approx(1.0, abs=1e-6)


def test_a_step_that_is_cut_is_left_out_and_a_gap_is_an_error(tmp_path: Path) -> None:
    cut = [*lines(), request("4-0", 4, 44.0, 45.0, 2)]
    assert analyse(write(tmp_path / "cut", cut)).job.steps == 4
    hole = [line for line in lines(5) if line.get("phase") != "sync" or line["step"] != 2]
    with pytest.raises(FormatError, match="step 2 lacks"):
        analyse(write(tmp_path / "hole", hole))
    later = [{key: value + 99 if key in ("submit", "start", "end") else value for key, value in line.items()}
             for line in lines()]  # fmt: skip
    with pytest.raises(FormatError, match="step 1 ends before step 0 has ended: two attempts"):
        analyse(write(tmp_path / "attempts", [*lines(), *later]))
    with pytest.raises(FormatError, match=r"^2 whole steps; needs 3"):
        analyse(write(tmp_path / "short", lines(2)))
    with pytest.raises(FormatError, match=r"^1 whole step; needs 3"):
        analyse(write(tmp_path / "shorter", lines(1)))


def test_times_without_trajectories_price_staleness_only(tmp_path: Path) -> None:
    phases = [line for line in lines() if "phase" in line]
    report = analyse(write(tmp_path / "run.jsonl", phases), "staleness=1", "partial=0.9")
    assert report.job.basis == "phases"
    assert prices(report) == {"staleness=1": 5.5, "partial=0.9": None}


def logged(step_time: StepTime, **phases: float) -> PhaseLog:
    seconds = {name.replace("_", "-"): np.full(3, value) for name, value in phases.items()}
    return PhaseLog(Format.VERL, step_time, np.arange(3), np.full(3, 100.0), seconds)


def test_logged_phases_price_staleness_between_its_bounds() -> None:
    report = LoggedRun(logged(StepTime.SERIAL, generate=50, train=30, sync=8)).account([Scenario.parse("staleness=1")])
    (price,) = report.what_if
    assert (price.step_s, price.low_s, price.high_s, price.saved_s) == (62.0, 50.0, 74.0, 38.0)
    kind, words = first_line(report)
    assert kind == "unaccounted"
    assert words == (  # the unaccounted 12 s may go, or double
        "12% of the step is in no phase; time what it does; one step of staleness saves 26 to 50%, oldest sample one"
        " step old"
    )


def test_the_error_of_a_price_holds_the_scatter_of_the_steps_and_is_that_of_the_fix(tmp_path: Path) -> None:
    """Training takes 10, 50 and 30 s: one step of staleness saves 30 s, +- half the 95 % interval of three, 4.303 x
    20 / sqrt(3).
    """
    log = tmp_path / "verl.log"
    log.write_text("".join(
        f"step:{step} - timing_s/gen:{100 - train} - timing_s/update_actor:{train} - timing_s/step:100\n"
        for step, train in enumerate((10, 50, 30))
    ))  # fmt: skip
    job = RlJob.read([log])
    (price,) = job.report.what_if
    assert (price.step_s, price.saved_s) == (70.0, 30.0)
    assert (price.low_s, price.high_s) == pytest.approx((70 - 49.683, 70 + 49.683), abs=1e-3)
    (fix,) = job.report.fixes
    assert fix.error_s == job.answer("staleness=1").error_s == pytest.approx(price.high_s - 70.0)
    assert fix.withheld == "the saving of 30.00 s is below its error of 49.68 s"
    assert (job.report.verdict.label, job.report.answer.headline) == ("phases", "generate takes 70% of the step")


def test_what_is_to_be_done_together_is_promised(tmp_path: Path) -> None:
    """Partial rollouts of the second run save less than their error, alone and on top of staleness, though both
    together save more than theirs.
    """
    for seed, together in ((5, {"partial", "staleness"}), (10, set())):
        drawn = draw("tail", seed)
        record(drawn, tmp_path / "run.jsonl")
        job = RlJob.read([tmp_path / "run.jsonl"], slots=drawn.slots)
        fixes = {fix.kind: fix for fix in job.report.fixes}
        assert (fixes["partial"].withheld is None) == bool(together)
        assert fixes["staleness"].withheld is None
        details = fixes["combination"].details if together else {"sequence": ()}
        assert {one["kind"] for one in details["sequence"]} == together
        both = job.answer("staleness=1,partial=0.9")
        assert both.saved_s > both.error_s


@pytest.mark.parametrize(
    ("phases", "kind"),
    [
        ({"generate": 20, "train": 5, "sync": 5}, "unaccounted"),
        ({"generate": 60, "train": 30, "sync": 5}, "sync"),
        ({"generate": 60, "train": 36}, "phases"),
        ({"generate": 30, "train": 10}, "unaccounted"),
    ],
)
def test_time_in_no_phase_leads_if_it_is_more_than_what_a_loss_or_the_longest_phase_takes(
    tmp_path: Path, phases: dict[str, float], kind: str
) -> None:
    names = {"generate": "gen", "train": "update_actor", "sync": "update_weights"}
    timers = "".join(f" - timing_s/{names[phase]}:{seconds}" for phase, seconds in phases.items())
    (tmp_path / "verl.log").write_text("".join(f"step:{step}{timers} - timing_s/step:100\n" for step in range(3)))
    report = RlJob.read([tmp_path / "verl.log"]).report
    verdict = report.verdict
    assert (str(verdict.kind), verdict.label) == (kind, kind)
    assert report.leading == ("sync" if "sync" in phases else None)


def test_how_the_step_is_logged_decides_what_is_known() -> None:
    scenarios = [Scenario.parse(text) for text in ("staleness=1", "partial=0.9", "partial=0.9,generate=20")]
    for step_time, phases, unaccounted, expected in (
        (StepTime.SERIAL, {"generate": 50, "train": 30}, 20.0, [70.0, None, 70.0]),
        (StepTime.SUMMED, {"generate": 60, "train": 40}, None, [60.0, None, 60.0]),
        (StepTime.OVERLAPPED, {"generate": 90, "train": 40}, 10.0, [100.0, None, 50.0]),
        (StepTime.SERIAL, {"exposed_generation": 50, "train": 40}, 10.0, [None, None, 120.0]),
        (StepTime.SERIAL, {"generate": 70, "train": 32}, -2.0, [None, None, None]),
    ):
        report = LoggedRun(logged(step_time, **phases)).account(scenarios)
        assert report.unaccounted_s == unaccounted, phases
        assert [one.step_s for one in report.what_if] == expected, phases


def test_a_scenario_that_cannot_be_read_says_what_could(tmp_path: Path) -> None:
    for text in (
        "",
        "stale=1",
        "partial=0",
        "partial=1.5",
        "partial=x",
        "engines=0",
        "split=1",
        "train=nan",
        "train=-1",
        "staleness=1,staleness=2",
    ):
        with pytest.raises(SelectionError):
            Scenario.parse(text)
    for text, words in (
        ("staleness=10000", "10000 is not in the range 0 to 9,999"),
        ("engines=0", "0 is not in the range 1 to 999,999"),
        ("split=4:-1", "-1 is not in the range 1 to 999,999"),
        ("partial=-0.5", "-0.5 is not a number above 0 and at most 1"),
        ("generate=fast", "fast is not a number above 0 and at most 1e+12"),
    ):
        with pytest.raises(SelectionError, match=re.escape(words)):
            Scenario.parse(text)
    for text in ("", "rollout=1", "rollout=0,trainer=2", "rollout=a,trainer=b"):
        with pytest.raises(SelectionError, match="--gpus"):
            Gpus.parse(text)
    path = write(tmp_path / "run.jsonl", lines())
    with pytest.raises(SelectionError, match="needs --gpus"):
        analyse(path, "split=1:1")
    with pytest.raises(SelectionError, match="no whole number of engines"):
        analyse(path, "split=3:1", gpus="rollout=2,trainer=2")


@pytest.mark.parametrize("seed", range(4))
def test_any_times_end_in_finite_figures_or_in_one_error(tmp_path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    asked = (
        "staleness=1",
        "staleness=9",
        "partial=0.01",
        "engines=5",
        "split=2:1",
        "longest-first",
        "generate=3,train=2",
    )
    reports = 0
    for _ in range(40):
        written = lines(int(chance.integers(3, 6)))
        for _ in range(int(chance.integers(0, 3))):
            line = written[int(chance.integers(len(written)))]
            key = str(chance.choice([key for key in line if isinstance(line[key], int | float)]))
            line[key] = type(line[key])(chance.choice([0, 1e-9, 3, 1e9, 1e14, line["start"], line["end"]]))
        try:
            report = analyse(write(tmp_path / "run.jsonl", written), *asked, gpus="rollout=1,trainer=2", slots=2)
        except FormatError:
            continue
        assert "null" not in msgspec.json.encode([report.step_s, report.losses, report.generation]).decode()
        assert all(one.step_s is None or np.isfinite(one.step_s) for one in report.what_if)
        assert (report.doubt is None) == any(one.step_s is not None for one in report.what_if)
        assert first_line(report)[1]
        reports += 1
    assert reports >= 15


def of_one_slot(steps: int = 4) -> list[dict[str, Any]]:
    """An engine that runs one request at a time, 0.5 s a token: 2, 4 and 8 tokens end at 1, 3 and 7 s."""
    written: list[dict[str, Any]] = []
    for step in range(steps):
        begin = 12.5 * step
        for number, (start, end, tokens) in enumerate(((0, 1, 2), (1, 3, 4), (3, 7, 8))):
            written.append(request(f"{step}-{number}", step, begin + start, begin + end, tokens, submit=begin))
        written += [
            {"phase": name, "step": step, "start": begin + start, "end": begin + end}
            for name, start, end in (("generate", 0, 7), ("reward", 7, 7.5), ("train", 7.5, 11.5), ("sync", 11.5, 12.5))
        ]
    return written


def test_a_partial_generation_of_the_longest_first_ends_with_the_longest(tmp_path: Path) -> None:
    """Each generation ends with its first request; the others go before new ones. In order of submission: 2 tokens;
    then 4, of 4, 8, 2; 8, of 8, 2, 2; ... The longest first: 8; then 4, of 4, 2, 8; 2; 8.
    """
    timeline = read_rl([write(tmp_path / "run.jsonl", of_one_slot())])
    assert isinstance(timeline, RlTimeline)
    generations = TimedRun(timeline, None, 1).generations
    assert generations is not None
    for text, seconds in (("partial=0.3", [1.0, 2.0, 4.0, 1.0]), ("partial=0.3,longest-first", [4.0, 2.0, 1.0, 4.0])):
        took, oldest = generations.in_scenario(Scenario.parse(text), None)
        assert took.tolist() == pytest.approx(seconds), text
        assert oldest == 2


def test_tools_by_hand(tmp_path: Path) -> None:
    """A request of 8 tokens of 0.5 s waits 4 s for a tool: without it, the step of 13 s takes 9 s."""
    written: list[dict[str, Any]] = []
    for step in range(6):
        begin = 13.0 * step
        written.append(request(f"{step}", step, begin, begin + 8, 8, tool_s=4.0))
        written += [
            {"phase": name, "step": step, "start": begin + start, "end": begin + end}
            for name, start, end in (("generate", 0, 8), ("train", 8, 12), ("sync", 12, 13))
        ]
    tools, sync = RlJob.read([write(tmp_path / "run.jsonl", written)]).report.findings
    assert (tools.kind, tools.effect) == ("tools", "a request spends 4.00 s in tools, 50% of its time")
    assert (tools.saved_s, sync.kind) == (pytest.approx(4.0), "sync")


def test_a_run_in_which_no_time_passes_and_steps_without_requests_are_errors(tmp_path: Path) -> None:
    at_once = [line | {"start": 5.0, "end": 5.0} | ({"submit": 5.0} if "submit" in line else {}) for line in lines()]
    without = [line for line in lines() if "phase" in line or line["step"] != 2]
    for written, words in (
        (at_once, "the mean step takes 0.0 s, its generation 0.0 s; expected more than 0 s"),
        (without, "some steps have trajectories and others none"),
    ):
        with pytest.raises(FormatError, match=words):
            analyse(write(tmp_path / "run.jsonl", written))
