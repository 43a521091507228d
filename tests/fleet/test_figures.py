"""What a study says, on tables made by hand, and whether chance is told from culprits."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import astuple
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from tests.dashboards.page_text import Pages
from tests.dashboards.page_text import found as components
from tests.documents.evil import EVIL, write_evil
from tests.fleet.few_jobs import STEPS, study_here
from tests.fleet.written import job, write_study
from tests.handmade import run, slow_trace
from tracekit.dashboards.terminal.fleet_screen import print_culprits
from tracekit.fleet.analyse import machines_of
from tracekit.fleet.figures import bootstrapped, counted_jobs, figures_of, interval, quantiles, ratio, samples_of
from tracekit.fleet.recurring_culprits import poisson_binomial_tail, q_values, recurring_culprits
from tracekit.fleet.study import Study
from tracekit.fleet.study_comparison import ChangeDirection, compare_studies
from tracekit.fleet.study_tables import exclusions_of, frame
from tracekit.fleet.tasks import Rule
from tracekit.store import Store


def test_jobs_are_grouped_by_size_the_smallest_first(tmp_path: Path) -> None:
    sizes = {"a": 8192, "b": 9, "c": 8, "d": 8193, "e": 32}
    study = write_study(
        tmp_path / "study",
        jobs=[job(name, 1.0, 100, gpus=gpus) for name, gpus in sizes.items()],
        sources=[{"source": name, "job": name} for name in sizes],
    )
    assert figures_of(study).groups["size"].select("group", "jobs").rows() == [
        ("up to 8", 1), ("9 to 32", 2), ("4,097 to 8,192", 1), ("above 8,192", 1),
    ]  # fmt: skip


def test_shares_are_of_jobs_and_of_gpu_hours_and_jobs_left_out_count_nowhere(tmp_path: Path) -> None:
    """Two of four jobs straggle; they have 300 of 400 GPU-hours, of which 150 are lost at S = 2."""
    study = write_study(
        tmp_path / "study",
        jobs=[job("a", 2.0, 200, team="x"), job("b", 2.0, 100, team="y"), job("c", 1.0, 50), job("d", 1.0, 50),
              job("e", 8.0, 10_000)],
        exclusions=[
            {"job": "e", "source": "e", "rule": "too-few-steps", "scope": "everywhere"},
            {"job": "e", "source": "e", "rule": "discrepancy", "scope": "everywhere"},
            {"job": None, "source": "f", "rule": "unreadable", "scope": "everywhere"},
            {"job": "a", "source": "a", "rule": "clock", "scope": "by-time"},
        ],
        sources=[{"source": name, "job": name[0]} for name in ("a", "b", "c", "d", "e", "e2")],
        causes=[
            {"job": "a", "kind": "bad-worker", "title": "slow", "lost_gpu_hours": 60.0},
            {"job": "b", "kind": "bad-worker", "title": "slow", "lost_gpu_hours": 20.0},
            {"job": "c", "kind": "python-gc", "title": "gc", "lost_gpu_hours": 0.1},  # 0.2 % of its step
        ],
        fixes=[
            {"job": "a", "kind": "planned-gc", "title": "better", "saved_gpu_hours": 40.0, "bound": False,
             "cause": "python-gc"},
            {"job": "a", "kind": "planned-gc", "title": "worse", "saved_gpu_hours": 30.0, "bound": False,
             "cause": "python-gc"},
            {"job": "b", "kind": "planned-gc", "title": "small", "saved_gpu_hours": 20.0, "bound": False,
             "cause": "python-gc"},
            {"job": "b", "kind": "compress-dp-communication", "title": "any", "saved_gpu_hours": 80.0, "bound": False},
            {"job": "b", "kind": "combination", "title": "all", "saved_gpu_hours": 90.0, "bound": False},
        ],
    )  # fmt: skip
    found = figures_of(study)
    assert (found.sources, found.contents, found.copies, found.jobs) == (7, 5, 1, 4)
    assert (found.gpu_hours, found.lost_gpu_hours) == (400, 150)
    assert (found.straggling_jobs.value, found.straggling_hours.value, found.lost.value) == (0.5, 0.75, 0.375)
    left_out = {str(one.rule): (one.jobs, one.first) for one in found.left_out}
    assert left_out == {"unreadable": (1, 1), "too-few-steps": (1, 1), "discrepancy": (1, 0), "clock": (1, 1)}
    assert found.causes.select("kind", "jobs", "lost_gpu_hours", "lost").rows() == [("bad-worker", 2, 80.0, 0.2)]
    for_cause, general = found.fixes  # first what a cause asks for, however much the other gives back
    assert (for_cause.kind, for_cause.jobs, for_cause.gpu_hours, for_cause.share.value) == ("planned-gc", 2, 60.0, 0.15)
    assert (for_cause.example, for_cause.for_causes) == ("better", True)
    assert (general.kind, general.gpu_hours, general.for_causes) == ("compress-dp-communication", 80.0, False)
    teams = found.groups["team"].select("group", "jobs", "lost_gpu_hours").rows()
    assert teams == [("x", 1, 100.0), ("y", 1, 50.0), ("unknown", 2, 0.0)]
    half = found.quantiles.filter(quantile=0.5).row(0, named=True)
    assert (half["slowdown_jobs"], half["slowdown_hours"]) == (1.0, 2.0)
    ours = {one.name: one.ours for one in found.paper}
    assert (ours["jobs with S >= 1.1"], ours["GPU-hours lost"]) == (0.5, 0.375)
    assert {one.status for one in found.paper} == {"as reported"}


def test_patterns_groups_and_the_figures_of_the_paper_are_shares_of_jobs_and_of_hours(tmp_path: Path) -> None:
    """Jobs a to d: S = 2, 2, 1 and 1.25; 100, 300, 400 and 200 GPU-hours, of which 50, 150, 0 and 40 are lost.

    The paper has no jobs as small as a. Weeks begin on Thursdays, like 1970: the first of these on 2008-05-01.
    """
    begin = 2000.0 * 7 * 86_400
    facts = [
        {"gpus": 127, "dp": 128, "started_at": begin, "gpu_model": "H100", "time_pattern": "persistent",
         "space_pattern": "one-worker", "m_w": 0.6, "m_s": 0.1, "forward_backward_correlation": 0.5},
        {"gpus": 128, "dp": 127, "started_at": begin + 604_799, "gpu_model": "H100", "time_pattern": "transient",
         "space_pattern": "one-stage", "m_w": 0.5, "m_s": 0.5, "forward_backward_correlation": 0.9},
        {"gpus": 256, "started_at": begin + 604_800, "time_pattern": "none", "space_pattern": "diffuse",
         "m_w": 0.7, "m_s": 0.7, "forward_backward_correlation": 0.95},
        {"gpus": 8192, "dp": 128, "gpu_model": "A100", "time_pattern": "persistent"},
    ]  # fmt: skip
    columns = dict.fromkeys(name for row in facts for name in row)
    sizes = zip("abcd", (2.0, 2.0, 1.0, 1.25), (100, 300, 400, 200), facts, strict=True)
    machines = [("a", "h1", "compute", 2.0), ("b", "h1", "network", 1.0), ("b", "h2", "compute", 2.5),
                ("c", "h3", None, None)]  # fmt: skip
    planned = {"kind": "planned-gc", "title": "t", "bound": False, "cause": "python-gc"}
    study = write_study(
        tmp_path / "study",
        jobs=[job(name, slowdown, hours, **columns | row) for name, slowdown, hours, row in sizes],
        machines=[dict(zip(("job", "machine", "part", "cost_s"), row, strict=True), kind="host") for row in machines]
        + [{"job": "c", "machine": "u1", "part": "compute", "cost_s": 9.0, "kind": "gpu"}],
        causes=[{"job": "d", "kind": "python-gc", "title": "gc", "lost_gpu_hours": 2.0},
                {"job": "c", "kind": "python-gc", "title": "gc", "lost_gpu_hours": 3.9}],
        fixes=[{"job": name, "saved_s": saved_s, **planned} for name, saved_s in (("a", 9.0), ("b", 4.0), ("d", 2.0))],
    )  # fmt: skip
    figures = figures_of(study)
    assert figures.patterns.rows() == [
        ("over steps", "none", 0.25, 0.4, 0.0),
        ("over steps", "persistent", 0.5, 0.3, 90.0),
        ("over steps", "transient", 0.25, 0.3, 150.0),
        ("over workers", "one-worker", 0.25, 0.1, 50.0),
        ("over workers", "one-stage", 0.25, 0.3, 150.0),
        ("over workers", "diffuse", 0.25, 0.4, 0.0),
        ("straggling because of", "the slowest 3% of workers, half of it or more", 0.5, 0.4, 200.0),
        ("straggling because of", "the last stage, half of it or more", 0.25, 0.3, 150.0),
        ("straggling because of", "sequence lengths (r >= 0.9)", 0.25, 0.3, 150.0),
        ("straggling because of", "garbage collection (a cause)", 0.25, 0.2, pytest.approx(40.0)),
    ]
    assert figures.causes.select("kind", "jobs", "lost_gpu_hours", "lost").rows() == [("python-gc", 1, 2.0, 0.002)]
    assert {name: rows.rows() for name, rows in figures.groups.items() if name != "team"} == {
        "size": [("33 to 128", 2, 1.0, 400.0, 200.0, 0.5), ("129 to 256", 1, 0.0, 400.0, 0.0, 0.0),
                 ("4,097 to 8,192", 1, 1.0, 200.0, pytest.approx(40.0), pytest.approx(0.2))],
        "week": [("2008-05-01", 2, 1.0, 400.0, 200.0, 0.5), ("2008-05-08", 1, 0.0, 400.0, 0.0, 0.0)],
        "gpu_model": [("H100", 2, 1.0, 400.0, 200.0, 0.5),
                      ("A100", 1, 1.0, 200.0, pytest.approx(40.0), pytest.approx(0.2)),
                      ("unknown", 1, 0.0, 400.0, 0.0, 0.0)],
        "host": [("h2", 1, 75.0), ("h1", 2, 50.0)],
    }  # fmt: skip
    assert [(row.ours and round(row.ours, 6), row.unit, row.jobs) for row in figures.paper] == [
        (0.666667, "share", 3), (0.211111, "share", 3), (0.2, "share", 3), (0.2, "share", 3), (0.5, "share", 2),
        (2.0, "S", 1), (0.666667, "share", 3), (0.666667, "share", 3), (1.5, "S", 2), (0.2, "share", 1),
    ]  # fmt: skip
    assert [row.name for row in figures.paper][2:4] == [
        "lost at least by the worst 10% of jobs", "lost at least by the worst 1% of jobs"]  # fmt: skip


def test_a_quantile_is_the_smallest_value_that_covers_its_share_of_jobs_or_of_hours() -> None:
    columns = {"slowdown": [4.0, 1.0, 2.0, None], "waste": [0.75, 0.0, 0.5, None], "gpu_hours": [10.0, 70.0, 20.0, 5.0]}
    jobs = pl.DataFrame(columns)
    assert quantiles(jobs, (0.5, 2 / 3, 0.7, 0.9, 0.95)).rows() == [
        (0.5, 2.0, 1.0, 0.5, 0.0), (2 / 3, 2.0, 1.0, 0.5, 0.0), (0.7, 4.0, 1.0, 0.75, 0.0), (0.9, 4.0, 2.0, 0.75, 0.5),
        (0.95, 4.0, 4.0, 0.75, 0.75),
    ]  # fmt: skip
    assert np.isnan(quantiles(jobs.clear(), (0.5,)).row(0)[1:]).all()


def test_fewer_samples_are_drawn_of_more_jobs() -> None:
    assert [samples_of(jobs) for jobs in (0, 1, 20_000, 40_000, 200_000, 10**7)] == [2000, 2000, 2000, 1000, 200, 200]


def test_a_share_of_nothing_is_unknown() -> None:
    none, two = np.zeros(2), np.array([1.0, 3.0])
    assert np.isnan(astuple(ratio(none, none, none, none))).all()
    assert astuple(ratio(two, two * 2, np.array([1.0, 2.0, 5.0]), np.array([4.0, 4.0, 0.0]))) == (
        0.5, pytest.approx(0.25 + 0.025 * 0.25), pytest.approx(0.5 - 0.025 * 0.25))  # fmt: skip


def test_the_bootstrap_has_the_spread_that_theory_says() -> None:
    """A mean of 400 draws of a coin: standard error 0.5 / sqrt(400)."""
    coin = np.repeat([0.0, 1.0], 200)[:, None]
    means = bootstrapped(coin)[:, 0] / 400
    assert means.std() == pytest.approx(0.025, rel=0.06)
    assert interval(means) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.005)


def test_the_tail_of_unlike_coins_is_that_of_counting_all_cases() -> None:
    chances = np.array([0.1, 0.5, 0.9, 0.3, 0.05])
    for least in range(7):
        whole = sum(
            np.prod(np.where(case, chances, 1 - chances))
            for case in itertools.product([False, True], repeat=5)
            if sum(case) >= least
        )
        assert poisson_binomial_tail(chances, least) == pytest.approx(whole)


def test_q_values_are_those_of_the_published_example() -> None:
    """Benjamini and Hochberg 1995, section 4: of these 15 p-values, 4 are discoveries at a rate of 5 %."""
    values = np.array([0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719,
                       0.6528, 0.7590, 1.0])  # fmt: skip
    assert (q_values(values[::-1])[::-1] <= 0.05).sum() == 4


def fleet_of_hosts(path: Path, bad: dict[str, float], seed: int) -> Study:
    """300 jobs on 8 of 60 hosts each; in every third job a host is slow: a bad one by its chance, else any."""
    generator = np.random.default_rng(seed)
    jobs, machines = [], []
    for number in range(300):
        hosts = [f"h{at}" for at in generator.permutation(60)[:8]]
        slow = {host for host in hosts if generator.random() < bad.get(host, 0.0)}
        slow |= {hosts[0]} if number % 3 == 0 else set()
        jobs.append(job(f"{number:03d}", 1.2 if slow else 1.0, 1.0, started_at=1e9 + number))
        for host in hosts:
            cause = {"part": "compute", "cost_s": 1.0} if host in slow else {"part": None, "cost_s": None}
            machines.append({"job": f"{number:03d}", "kind": "host", "machine": host, **cause})
    return write_study(path, jobs=jobs, machines=machines)


def test_a_machine_has_the_costliest_that_speaks_of_machines_on_its_ranks() -> None:
    """Two hosts with two GPUs each: late data costs most on the first and is no machine's."""
    workers = frame(
        "workers",
        {
            "host": ["a", "a", "b", "b"],
            "gpu": ["u0", "u1", None, "u3"],
            "part": ["data", "compute", None, "network"],
            "cost_s": [9.0, 2.0, None, 1.0],
        },
    )
    rows = machines_of(workers).select("kind", "machine", "part", "cost_s").rows()
    assert rows == [
        ("host", "a", "compute", 2.0),
        ("host", "b", "network", 1.0),
        ("gpu", "u0", None, None),
        ("gpu", "u1", "compute", 2.0),
        ("gpu", "u3", "network", 1.0),
    ]


def test_machines_that_recur_are_named_and_chance_names_hardly_any(tmp_path: Path) -> None:
    found = recurring_culprits(fleet_of_hosts(tmp_path / "bad", {"h7": 0.5, "h21": 0.5}, seed=1))
    assert set(found["machine"][:2]) == {"h7", "h21"}
    assert found.height <= 3
    worst = found.filter(machine="h7").row(0, named=True)
    assert (worst["kind"], worst["parts"]) == ("host", "compute")
    assert worst["hit"] > 3 * worst["expected"]
    assert worst["lost_gpu_hours"] == pytest.approx(worst["hit"] * 0.1)  # 1 s of 10 s of 1 GPU-hour each
    named = [recurring_culprits(fleet_of_hosts(tmp_path / str(seed), {}, seed)).height for seed in range(10)]
    assert sum(count > 0 for count in named) <= 2


def test_machines_that_recur_are_a_table_in_the_terminal_and_a_link_to_all_of_them_on_the_page(tmp_path: Path) -> None:
    study = fleet_of_hosts(tmp_path / "bad", {"h7": 0.5, "h21": 0.5}, seed=1)
    found = recurring_culprits(study)
    shown = run("fleet", "culprits", study.path).out
    assert all(f" {machine} " in shown for machine in found["machine"])
    console = Console(file=io.StringIO(), width=200)
    print_culprits(found, 0.05, console, most=1, all_culprits="COMMAND")
    shown = console.file.getvalue()
    assert found["machine"][0] in shown
    assert found["machine"][1] not in shown
    assert f" {found.height - 1} more with `COMMAND`." in shown
    page = Pages(Store(tmp_path / "jobs.store").path, study.path).page("/fleet")
    files = [unquote(link.href) for link in components(page, "A") if link.children == "CSV"]
    assert any(all(f",{machine}," in file for machine in found["machine"]) for file in files)


def test_jobs_left_out_are_none_of_a_machine(tmp_path: Path) -> None:
    """Three jobs on hosts a and b. In the first a is hit: by chance with 1 of 2. The third, hit too, is left out."""
    hit, fine = {"part": "compute", "cost_s": 1.0}, {"part": None, "cost_s": None}
    rows = [(name, host, hit if host == "a" and name != "two" else fine)
            for name in ("one", "three", "two") for host in "ab"]  # fmt: skip
    study = write_study(
        tmp_path / "study",
        jobs=[job(name, 1.2, 1.0, started_at=1e9) for name in ("one", "three", "two")],
        machines=[{"job": name, "kind": "host", "machine": host, **cause} for name, host, cause in rows],
        exclusions=[{"job": "three", "source": "three", "rule": "too-few-steps", "scope": "everywhere"}],
    )
    found = recurring_culprits(study, rate=1.0).sort("machine").select("machine", "jobs", "hit", "expected", "last_job")
    assert found.rows() == [("a", 2, 1, 0.5, "one"), ("b", 2, 0, 0.5, None)]


def test_what_became_worse_is_told_from_what_scatters(tmp_path: Path) -> None:
    """Team x loses a sixth more, to gc; team y and all else scatter as before."""
    generator = np.random.default_rng(3)
    sides = []
    for side, extra in (("before", 0.0), ("after", 0.2)):
        slow = 1 + generator.exponential(0.05, 400)
        jobs = [job(f"{at:03d}", slow[at] + (extra if at % 2 else 0.0), 1.0, team="x" if at % 2 else "y")
                for at in range(400)]  # fmt: skip
        causes = [
            {"job": f"{at:03d}", "kind": "python-gc", "lost_gpu_hours": 0.01 + extra * 0.7} for at in range(1, 400, 2)
        ]
        causes += [{"job": f"{at:03d}", "kind": "bad-worker", "lost_gpu_hours": 0.02} for at in range(0, 400, 2)]
        sides.append(write_study(tmp_path / side, jobs=jobs, causes=causes))
    directions = {one.name: one.direction for one in compare_studies(*sides).changes}
    worse, unclear = ChangeDirection.WORSE, ChangeDirection.UNCLEAR
    assert directions == {"jobs that straggle": worse, "GPU-hours lost": worse, "python-gc": worse, "x": worse,
                          "bad-worker": unclear, "y": unclear}  # fmt: skip
    compared = ("fleet", "compare", tmp_path / "before", tmp_path / "after")
    told = json.loads(run(*compared, "--json").out)
    assert (told["jobs_before"], {one["name"]: one["direction"] for one in told["changes"]}) == (400, directions)
    ran = run(*compared, "--fail-on-worse")
    assert ran.code == 3
    assert ran.out.startswith("4 of 6 figures are worse, 0 better; 400 jobs before, 400 after")


def test_a_quantile_is_reached_by_that_share_of_the_weight() -> None:
    jobs = pl.DataFrame({"slowdown": [1.0, 2.0, 3.0], "waste": [0.0, 0.5, 2 / 3], "gpu_hours": [1.0, 1.0, 8.0]})
    found = quantiles(jobs, (1 / 3, 0.5, 1.0))
    assert found["slowdown_jobs"].to_list() == [1.0, 2.0, 3.0]
    assert found["slowdown_hours"].to_list() == [3.0, 3.0, 3.0]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jobs, one whose names are as bad as names can be."""
    folder = tmp_path_factory.mktemp("report")
    write_evil(folder)
    slow_trace(STEPS, metadata={"team": EVIL}).write_parquet(folder / "slow.parquet")
    study_here(folder, out=folder / "study")
    return folder / "study"


def test_the_commands_say_it_in_the_terminal_as_json_as_a_page_and_as_csv(study: Path, tmp_path: Path) -> None:
    shown = run("fleet", "report", study)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("100.0% of 2 jobs straggle; ")
    found = json.loads(run("fleet", "report", study, "--json").out)
    assert (found["jobs"], found["left_out"], found["culprits"]) == (2, [], [])
    page = tmp_path / "fleet.html"
    assert run("fleet", "report", study, "--html", page).out == f"Wrote {page}\n"
    text = page.read_text()
    assert "<img" not in text
    assert "&lt;img src=x" in text
    assert "http" not in text.replace("http-equiv", "").replace("https://www.usenix.org", "")
    assert run("fleet", "culprits", study, "--csv", tmp_path / "c.csv").code == 0
    assert (tmp_path / "c.csv").read_text().startswith("kind,machine,jobs,hit,")


def test_the_report_answers_on_one_screen_and_says_how_to_see_all(study: Path) -> None:
    shown, full = (run("fleet", "report", study, *more, env={"COLUMNS": "80"}).out for more in ((), ("--full",)))
    assert len(shown.splitlines()) <= 24
    assert shown.endswith(f"Next   tracekit fleet report {study} --full\n")
    beginning = shown.partition("\n\n")[0]
    assert full.startswith(beginning)
    assert ("GPU-hours lost by cause" in shown, "What jobs lose" in shown) == (True, False)
    assert "What jobs lose" in full


def test_a_study_of_several_versions_of_the_analysis_says_so(tmp_path: Path) -> None:
    for number, versions in enumerate((("one", "one"), ("one", "two"))):
        jobs = [job(name, 1.2, 1.0, analysis=version) for name, version in zip("ab", versions, strict=True)]
        shown = run("fleet", "report", write_study(tmp_path / str(number), jobs=jobs).path).out
        mixed = "jobs of 2 versions of the analysis: run the sources again"
        assert (mixed in shown) == (len(set(versions)) > 1)


def test_an_empty_study_says_so(tmp_path: Path) -> None:
    empty = write_study(tmp_path / "study")
    assert counted_jobs(empty).is_empty()
    assert run("fleet", "report", tmp_path / "study").out.startswith("No job counts: every one was left out.")
    assert run("fleet", "report", tmp_path / "study", "--html", tmp_path / "page.html").code == 0


def test_a_job_is_left_out_by_each_rule_that_it_breaks() -> None:
    usual = {"steps": 3, "restarts": 15, "unexplained": -0.05, "replay_error": 0.05, "trustworthy": True}
    for change, rule, reason in (
        ({}, None, ""),
        ({"steps": 2}, Rule.FEW_STEPS, "2 steps; expected 3 or more"),
        ({"restarts": 16}, Rule.RESTARTS, "16 restarts; expected 15 at most"),
        ({"unexplained": 0.06}, Rule.DISCREPANCY, "6.0% of the step is unexplained; expected at most 5%"),
        ({"unexplained": -0.06}, Rule.DISCREPANCY, "-6.0% of the step is unexplained; expected at most 5%"),
        ({"replay_error": 0.07}, Rule.REPLAY_ERROR, "the replay misses the recording by 7.0%"),
        ({"replay_error": float("nan")}, Rule.REPLAY_ERROR, "the replay misses the recording by nan%"),
        ({"trustworthy": False, "doubts": "clocks are off"}, Rule.DOUBTFUL, "clocks are off"),
        ({"trustworthy": False, "doubts": None}, Rule.DOUBTFUL, "the report cannot be trusted"),
    ):
        found = [(each.rule, each.reason) for each in exclusions_of(usual | change, 1e9)]
        assert found == ([] if rule is None else [(rule, reason)])


def test_a_study_beside_an_empty_one_has_figures_and_no_change(tmp_path: Path) -> None:
    full = write_study(tmp_path / "full", jobs=[job("one", 1.25, 10.0), job("two", 1.0, 10.0)])
    found = compare_studies(write_study(tmp_path / "empty"), full)
    assert (found.jobs_before, found.jobs_after) == (0, 2)
    figures = {each.name: each.after for each in found.changes}
    assert figures == {"GPU-hours lost": pytest.approx(0.1), "jobs that straggle": 0.5}
    assert {each.direction for each in found.changes} == {ChangeDirection.UNCLEAR}
    assert all(np.isnan([each.before, each.change.low, each.change.high]).all() for each in found.changes)
