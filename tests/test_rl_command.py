"""`tracekit rl`: the report in the terminal, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import tracekit
from tests.analysis.rl.logs import lines, write
from tests.cases import case
from tests.handmade import run
from tests.outputs import report_schema
from tracekit.analysis.job.job import ReportOptions
from tracekit.analysis.job.rl_job import AnalysedRun, RlJob, _engines
from tracekit.analysis.rl.account import RlAccount
from tracekit.base.errors import SelectionError, TraceError
from tracekit.dashboards.documents.markdown import markdown
from tracekit.report.rl_step import Generation, LossTime
from tracekit.store import Store

VERL = "".join(
    f"step:{step} - timing_s/gen:60.0 - timing_s/update_actor:30.0 - timing_s/step:100.0\n" for step in range(3)
)
KEYS = [
    "step_s", "length_s", "replayed_s", "generation_s", "trainer_wait_s", "staleness", "phases",
    "unaccounted_s", "flagged", "doubt", "losses", "leading", "generation", "what_if",
    "left_out", "restarts", "unlike", "sides", "tools",
]  # fmt: skip


def test_the_first_screen(tmp_path: Path) -> None:
    ran = run("rl", write(tmp_path / "run.jsonl", lines()))
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= 80
    words = " ".join(ran.out.split())
    assert words.startswith("run.jsonl trajectories, 4 steps, 12 trajectories on 1 engine")
    assert "SYNC: the weight sync costs 9% of the step; one step of staleness saves 50%, oldest" in words
    assert "a decoding step takes 250 ms + 250 ms for each running request" in words
    assert "Trust yes: the replayed step is off by 0.0%" in words
    assert "partial=0.9 11.00 s 0.00 s 0%" in words  # all three requests, as 0.9 x 3 is more than two


def test_a_lost_step_is_named_and_so_is_what_the_trust_is_without(tmp_path: Path) -> None:
    step = "step:{0} - timing_s/gen:60.0 - timing_s/update_actor:30.0 - timing_s/step:100.0\n"
    log = tmp_path / "verl.log"
    log.write_text("".join(map(step.format, (0, 1, 2, 4, 5))))
    words = " ".join(run("rl", log).out.split())
    assert "Trust yes: seconds as the framework logged them, but for step 3; nothing was replayed" in words
    assert "Left out step 3 without a whole record" in words


def test_of_one_measured_step_nothing_is_sure_or_promised(tmp_path: Path) -> None:
    """Three recorded steps have one after the warm-up; a log of one step has just that."""
    reason, timed = "one step was measured, which does not show how steps differ; record more", lines(reward_s=2.0)
    (tmp_path / "verl.log").write_text(VERL.splitlines()[0].replace("train", "reward"))
    (tmp_path / "two.log").write_text("\n".join(VERL.splitlines()[:2]))
    assert "Trust NO: two steps were measured, which do not show" in " ".join(
        run("rl", tmp_path / "two.log").out.split()
    )
    few = write(tmp_path / "few.jsonl", [line for line in timed if line["step"] < 3])
    for log, known in ((few, False), (tmp_path / "verl.log", False), (write(tmp_path / "run.jsonl", timed), True)):
        report = tracekit.load(log).report
        assert report.trust.trustworthy == known, log
        assert ({fix.withheld for fix in report.fixes} == {reason}) != known
        assert {cause.confidence > 0 for cause in report.findings if cause.priced} <= {known}
        assert all((price.high_s is not None) == known for price in report.what_if)
        assert {price.assumes for price in report.what_if} == {reason} or known
        assert bool(report.alarming) == known
    words = " ".join(run("rl", few, "--html", tmp_path / "page.html").out.split())
    for text in (words, markdown(tracekit.load(few).report), (tmp_path / "page.html").read_text()):
        assert "NOT TRUSTED, looks like REWARD" in text
    assert "NOT TRUSTED, looks like REWARD: the reward costs 16% of the step Cost" in words
    assert f"Saves no saving promised, {reason}" in words
    assert f"Trust NO: {reason}" in words


def test_a_loss_below_0_says_what_that_means(tmp_path: Path) -> None:
    job = RlJob.read([write(tmp_path / "run.jsonl", lines())])
    for lost_s, words in ((-0.5, "below 0 (engines): without it, the step would take longer"), (0.0, None)):
        losses = [LossTime("engines", lost_s), LossTime("sync", 1.0)]
        account = msgspec.structs.replace(job.evidence.account, losses=losses)
        diagnosis = job.analysis.diagnosis
        asked = ReportOptions()
        run_of = AnalysedRun(evidence=job.evidence, diagnosis=diagnosis, asked=asked, name="run", account=account)
        (table,) = (one for one in run_of.analysis().report.sections if one.title == "Losses")
        assert table.note == words


def test_bytes_that_are_no_text_are_not_called_parquet(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(bytes(range(256)))
    ran = run("gate", tmp_path / "run.jsonl", "--baseline", write(tmp_path / "before.jsonl", lines()))
    assert ran.message.removeprefix(f"tracekit: {tmp_path}/run.jsonl: ") == (
        "a file, not a trace; `tracekit import --format` lists the formats that tracekit reads"
    )


def test_the_json_has_the_documented_keys(tmp_path: Path) -> None:
    """`rl` and `whatif` print one object, in which the account of the loop has its keys beside those of any report."""
    log = write(tmp_path / "run.jsonl", lines())
    report = json.loads(run("rl", log, "--json").out)
    assert report == json.loads(run("whatif", log, "--json").out)
    assert list(report)[-len(KEYS) :] == list(report_schema()["$defs"]["Report"]["properties"])[-len(KEYS) :] == KEYS
    assert set(KEYS) | {"job"} == set(RlAccount.__struct_fields__)
    job = {"format": "trajectories", "steps": 4, "trajectories": 12, "engines": 1, "basis": "trajectories"}
    assert {name: report["job"][name] for name in job} == job
    assert [one["scenario"] for one in report["what_if"]] == ["staleness=1", "partial=0.9", "longest-first"]


def test_a_log_without_times(tmp_path: Path) -> None:
    (tmp_path / "verl.log").write_text(VERL)
    ran = run("rl", tmp_path / "verl.log")
    assert (
        "PHASES: generate takes 60% of the step; one step of staleness saves 20 to 40%, oldest sample one step old"
        in (" ".join(ran.out.split()))
    )
    asked = run("rl", tmp_path / "verl.log", "--what-if", "partial=0.9", "--json")
    (price,) = json.loads(asked.out)["what_if"]
    assert (price["step_s"], price["assumes"].split(",")[0]) == (None, "needs trajectories")


def test_the_page_needs_no_network_and_escapes_names(tmp_path: Path) -> None:
    hostile = [line | ({"engine": "<b>&"} if "engine" in line else {"phase": line["phase"]}) for line in lines()]
    hostile += [{"phase": "<i>", "step": step, "start": 11.0 * step + 6, "end": 11.0 * step + 7} for step in range(4)]
    page = tmp_path / "page.html"
    for log in (write(tmp_path / "<u>.jsonl", hostile), write(tmp_path / "verl", [])):
        if log.name == "verl":
            log.write_text(VERL)
        ran = run("rl", log, "--html", page)
        assert (ran.code, ran.err.splitlines()[-1]) == (0, f"Wrote {page}")
        text = page.read_text()
        assert "Phases over steps" in text
        assert ("Requests of the longest generation" in text) == (log.name != "verl")
        assert not any(tag in text for tag in ("<b>&", '<i>"', "<u>", "<script", "http://", "https://"))
    page.write_text("mine")
    assert run("rl", log, "--html", page).code == 2
    assert page.read_text() == "mine"


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "prose").write_text("hello\n")
    for name in ("one.log", "two.log"):
        (tmp_path / name).write_text(VERL)
    write(tmp_path / "requests.jsonl", [line for line in lines() if "trajectory" in line])
    write(tmp_path / "huge.jsonl", [line | {"step": 1 << 31} for line in lines()])
    good = write(tmp_path / "run.jsonl", lines())
    for arguments, words in (
        (["huge.jsonl"], "`int` <= 2147483647 - at `$.step`"),
        (["prose"], "no line is as verl"),
        (["one.log", "two.log"], "one.log and two.log have the same steps: two runs"),
        (["requests.jsonl"], "0 whole steps; needs 3"),
        (["nowhere"], "no such file"),
        ([good, "--what-if", "magic"], "none of staleness=K"),
        ([good, "--what-if", "split=1:1"], "needs --gpus"),
        ([good, "--gpus", "8"], "expected the GPUs of both roles"),
        ([good, "--slots", "0"], "0 is not in the range"),
        ([good, "--format", "slime"], "no whole step"),
        ([], "missing argument"),
    ):
        ran = run("rl", *arguments, cwd=tmp_path)
        assert (ran.code, ran.out) == (2, ""), arguments
        assert words in ran.err.lower() or words in ran.err
        assert len(ran.err.strip().splitlines()) == 1


def test_a_contradiction_is_the_verdict_of_every_command(tmp_path: Path) -> None:
    """The training ends 5 s after the sync has begun."""
    longer = [line | ({"end": line["end"] + 5} if line.get("phase") == "train" else {}) for line in lines()]
    flagged = write(tmp_path / "flagged.jsonl", longer)
    for command in ("rl", "whatif"):
        assert "\nCONTRADICTION: the phases of a step take 15.50 s" in run(command, flagged).out
    report = json.loads(run("whatif", flagged, "--json", "--fix", "staleness=1").out)
    assert (report["causes"], report["fixes"], report["questions"]) == ([], [], [])
    assert report["what_if"][0]["step_s"] is None
    assert run("import", flagged, "--store", tmp_path / "jobs.store").code == 0
    assert run("culprits", flagged).code == 5
    whole = write(tmp_path / "whole.jsonl", lines())
    for one, other in ((flagged, whole), (whole, flagged)):
        gate = run("gate", one, "--baseline", other)
        assert (gate.code, gate.err.count("flagged.jsonl: the phases of a step take 15.50 s")) == (2, 1)


def test_two_logs_compare_by_their_phases(tmp_path: Path) -> None:
    """By hand: the generation takes 20 s less, and the rest as long. A log may have no phases at all."""
    logged = "".join(VERL.splitlines(keepends=True)[0].replace("step:0", f"step:{step}", 1) for step in range(5))
    (tmp_path / "before").write_text(logged)
    (tmp_path / "after").write_text(logged.replace("gen:60.0", "gen:40.0").replace("step:100.0", "step:80.0"))
    (tmp_path / "bare").write_text("step:1 - timing_s/step:80.0\nstep:2 - timing_s/step:80.0\n")
    found = json.loads(run("compare", tmp_path / "before", tmp_path / "after", "--json").out)
    assert (found["outcome"], found["kinds"]) == ("better", "what phases take: generate 20.00 s less")
    assert found["by_kind"][0] == {"kind": "generate", "before_s": 60.0, "after_s": 40.0}
    assert run("compare", tmp_path / "bare", tmp_path / "before").code == 0
    more = [line | {"engine": "b"} if line.get("tokens") == 8 else line for line in lines(6)]
    runs = write(tmp_path / "one", lines(6)), write(tmp_path / "two", more)
    assert "Layouts: 1 engine before, 2 engines after." in json.loads(run("compare", *runs, "--json").out)["notes"]


def test_a_gate_judges_the_step_and_its_phases(tmp_path: Path) -> None:
    before, after = write(tmp_path / "a.jsonl", lines(9)), write(tmp_path / "b.jsonl", lines(9, sync_s=2.0))
    assert run("gate", before, "--baseline", before).code == 0
    ran = run("gate", after, "--baseline", before, "--noise", "1%", "--json")
    rows = {row["name"]: (row["outcome"], row["before_s"], row["after_s"]) for row in json.loads(ran.out)["rows"]}
    assert (ran.code, rows["step"]) == (3, ("regression", 11.0, 12.0))
    assert rows["sync"] == ("regression", 1.0, 2.0)
    assert rows["train"] == ("pass", 4.0, 4.0)
    (tmp_path / "verl").write_text(VERL)
    assert "is of another job" in run("gate", tmp_path / "verl", "--baseline", before).message


def test_damaged_ops_are_one_error(tmp_path: Path) -> None:
    trace = tracekit.load(write(tmp_path / "run.jsonl", lines())).trace
    known = trace.metadata["post_training"]
    for damaged in ({}, 7, {"format": "verl"}, known | {"engines": []}, known | {"begun": [0.0, 1.0]}):
        dataclasses.replace(trace, metadata={"post_training": damaged}).write_parquet(tmp_path / "bad.parquet")
        ran = run("whatif", tmp_path / "bad.parquet")
        assert (ran.code, "damaged ops of post-training" in ran.message) == (2, True)
        assert run("store", "list", tmp_path / "bad.parquet").code == 0


def test_the_bill_of_a_run_is_as_long_as_the_run(tmp_path: Path) -> None:
    """Four steps of 11 s, the first of which starts 9 s late: 53 s, of which the last two steps are measured."""
    written = [line | ({"start": -9.0} if line["step"] == 0 and line.get("phase") == "generate" else {})
               for line in lines()]  # fmt: skip
    log, store = write(tmp_path / "run.jsonl", written), tmp_path / "jobs.store"
    account = json.loads(run("rl", log, "--json").out)
    assert (account["job"]["steps"], account["step_s"], account["length_s"]) == (4, 11.0, 53.0)
    shown = " ".join(run("rl", log).out.split())
    assert "11.00 s from sync to sync, the mean of 2 after the first 2;" in shown
    assert run("import", log, "--store", store).code == 0
    (job,) = json.loads(run("bill", store, "--json").out)["jobs"]
    assert job["wall_s"] == pytest.approx(53.0)
    of_log, of_store = (run("bill", path).out.partition("\nNext")[0] for path in (log, store))
    assert of_log == of_store
    assert "the first 2 steps of a run warm up" in run("gate", log, "--baseline", log, "--noise", "1%").out


def test_staleness_has_no_price_where_the_training_is_not_known(tmp_path: Path) -> None:
    """Neither of recorded times nor of a log; with train=S, both have one."""
    written = [line for line in lines() if line.get("phase") != "train"]
    timed, logged = write(tmp_path / "run.jsonl", written), tmp_path / "verl.log"
    logged.write_text(VERL.replace("update_actor", "other"))
    for path in (timed, logged):
        unknown, stated = json.loads(
            run("rl", path, "--what-if", "staleness=1", "--what-if", "staleness=1,train=4", "--json").out
        )["what_if"]
        assert (unknown["step_s"], unknown["assumes"]) == (
            None,
            "the time of the training is not known; state it with train=S",
        )
        assert stated["step_s"] is not None
    assert "saves" not in run("rl", logged).out


def test_messages_name_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    """A log with bytes that are no text, ops without a row, addresses of storage that nobody reads."""
    log, ops = tmp_path / "train.log", tmp_path / "ops.parquet"
    log.write_bytes(b"\0\0\0" + VERL.encode())
    assert "train.log: not text; give the log that the framework printed" in run("whatif", log).message
    log.write_text(VERL)
    trace = tracekit.load(log).trace
    dataclasses.replace(trace, ops=trace.ops.head(0)).write_parquet(ops)
    assert "ops.parquet: no ops (0 rows)" in run("whatif", ops).message
    told = run("whatif", "abfs://container/ops.parquet").message
    assert "no such file or folder; addresses of object storage begin with s3://, gs://, az://" in " ".join(
        told.split()
    )


def test_an_option_of_other_jobs_says_whose_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", lines())
    for words, whose in (
        ("--layers 1,2", "--layers is for pipeline traces"),
        ("--keep rank=1", "--keep is for pipelines and op traces"),
        ("--precision bf16", "--gpu or --precision is for pipelines and op traces"),
    ):
        with case(words):
            said = run("whatif", path, *words.split()).message
            assert said == f"tracekit: {whose}; run.jsonl is a run of post-training (docs/rl.md)"


def test_words_of_pipelines_are_in_no_report_of_a_log(tmp_path: Path) -> None:
    log, runs = tmp_path / "train.log", write(tmp_path / "run.jsonl", lines())
    log.write_text(VERL)
    compared = run("compare", log, log).out
    assert "phases alone, 3 steps" in compared
    assert "yes: seconds as the framework logged them; nothing was replayed" in compared
    assert "engine" not in compared
    shown = " ".join(run("whatif", runs, "--fix", "fix=staleness").out.split())
    assert "that fix of the report, all else as recorded" in shown
    assert "peers" not in shown


def figures_of_gpus(content: object, name: str = "") -> Iterator[object]:
    """Every number of GPUs or GPU-hours in a report."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from figures_of_gpus(value, key)
    elif isinstance(content, list):
        for value in content:
            yield from figures_of_gpus(value)
    elif name == "gpus" or "gpu_hours" in name:
        yield content


def test_gpus_that_nobody_stated_are_unknown_and_so_are_gpu_hours(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text(
        "".join(f"step:{step} - timing_s/gen:6.0 - timing_s/reward:1.0 - timing_s/step:10.0\n" for step in range(1, 9))
    )
    for path in (log, write(tmp_path / "run.jsonl", lines())):
        with case(path.name):
            report = json.loads(run("whatif", path, "--fix", "staleness=1", "--json").out)
            figures = list(figures_of_gpus(report))
            assert len(figures) > 6
            assert set(figures) == {None}
            assert "by_rank" not in report
            for words in (("whatif", path, "--full", "--explain"), ("whatif", path, "--markdown", "-"), ("rl", path)):
                assert "GPU-hours" not in run(*words, *(["--gpu-hour", "2"] if words[0] == "whatif" else [])).out
    store = tmp_path / "jobs.store"
    assert run("import", log, "--store", store).code == 0
    (row,) = Store(store).jobs()
    assert (row.name, row.gives_back) == ("verl.log", None)
    stated = json.loads(run("rl", tmp_path / "run.jsonl", "--gpus", "rollout=4,trainer=2", "--json").out)
    assert stated["job"]["gpus"] == 6
    assert stated["verdict"]["lost_gpu_hours_per_day"] == pytest.approx(stated["verdict"]["share"] * 6 * 24)


def test_a_question_without_a_price_says_why_and_ops_are_not_asked_for(tmp_path: Path) -> None:
    longer = [line | ({"end": line["end"] + 5} if line.get("phase") == "train" else {}) for line in lines()]
    flagged = RlJob.read([write(tmp_path / "flagged.jsonl", longer)])
    phases = RlJob.read([write(tmp_path / "phases.jsonl", [line for line in lines() if "phase" in line])])
    assert phases.report.trust.trustworthy  # no replay of requests is needed
    for ask, words in (
        (lambda: flagged.answer("staleness=1"), "staleness=1: no price, the phases of a step take 15.50 s"),
        (lambda: phases.answer("partial=0.9"), "partial=0.9: no price, needs trajectories"),
        (
            lambda: phases.replay,
            "a graph of ops is for pipelines and op traces; phases.jsonl is a run of post-training",
        ),
        (lambda: phases.attribute_by("rank", "host"), "S by rank, host is for pipelines and op traces"),
        (lambda: phases.without_steps([1]), r"phases.jsonl is a run .*: only pipelines can leave out steps"),
        (phases.pipeline_evidence, "phases.jsonl: no pipeline of microbatches"),
    ):
        with pytest.raises((SelectionError, TraceError), match=words):
            ask()


def test_the_timeline_of_the_chosen_steps_is_written(tmp_path: Path) -> None:
    """Three requests and four phases a step."""
    job = RlJob.read([write(tmp_path / "run.jsonl", lines())])
    assert repr(job) == "<Job run.jsonl: 4 steps of post-training>"
    job.build()  # what its answers are made from, though it has no graph
    assert job.export(tmp_path / "all.json.gz").slices == 28
    done = job.export(tmp_path / "some.json.gz", steps=[1, 3, 7])
    assert (done.steps, done.steps_in_job, done.slices) == (2, 4, 14)
    drawn = [
        one
        for one in json.loads(gzip.decompress((tmp_path / "some.json.gz").read_bytes()))["traceEvents"]
        if one["ph"] == "X"
    ]
    assert {one["args"]["step"] for one in drawn} == {1, 3}
    assert [one["dur"] for one in drawn if one["name"] == "sync"] == [1e6, 1e6]
    with pytest.raises(SelectionError, match=r"run.jsonl has none of these steps; it has 0 to 3"):
        job.export(tmp_path / "none.json.gz", steps=[4])


def test_a_redacted_run_has_the_same_numbers_and_no_names(tmp_path: Path) -> None:
    both = [
        line | {"engine": f"host-{line['tokens'] % 3}"} if "tokens" in line else line
        for line in lines(sync_s=2.0, reward_s=1.0)
    ]
    path = write(tmp_path / "secret.jsonl", both)
    named, redacted = (json.loads(run("whatif", path, "--json", *words).out) for words in ((), ("--redact",)))
    assert sorted(named["generation"]["speeds"]) == ["host-1", "host-2"]
    assert sorted(redacted["generation"]["speeds"]) == ["engine-0", "engine-1"]
    assert "secret" not in json.dumps(redacted)
    assert [redacted[key] for key in ("step_s", "losses", "what_if")] == [
        named[key] for key in ("step_s", "losses", "what_if")
    ]


def test_stale_weights_and_uneven_engines_are_remarked(tmp_path: Path) -> None:
    stale = [line | ({"version": max(line["step"] - 1, 0)} if "tokens" in line else {}) for line in lines(6)]
    assert "weights lag behind by 1 step " in " ".join(
        run("rl", write(tmp_path / "run.jsonl", stale)).out.replace("Engines", " ").split()
    )
    speeds = {"a": 0.5, "b": 1.0, "c": 1.5, "d": 1.6, "e": 1.7, "f": 1.8}
    words = list(_engines(Generation(0.01, 0.002, speeds, 1, 5.0, 0.0, 0.0)))
    assert words[1:] == [
        "1 slot an engine",
        "a at 0.5 times the median speed",
        "c at 1.5 times the median speed",
        "d at 1.6 times the median speed",
        "2 more are uneven",
    ]
