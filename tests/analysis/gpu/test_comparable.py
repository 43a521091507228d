"""Of a folder with a damaged file, the culprit is found as without the damage, or the report says that it is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from judges.kinetosim import Job, Trouble
from tests.analysis.gpu.jobs import loaded, said
from tracekit.report.finding import LossKind
from tracekit.report.report import Report

HOST, GPU = ("cuda_runtime", "cpu_op", "user_annotation"), ("kernel", "gpu_memcpy")
#: Rank 2 waits 1.5 ms for its data in each of four steps, a third of the job.
CULPRIT, OTHER = 2, 1
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job of which every rank recorded all that it should have."""
    folder = tmp_path_factory.mktemp("undamaged")
    job = Job(ranks=4, steps=4, layers=4, bucket=2, seed=3, troubles=(Trouble(CULPRIT, input_us=1500.0),)).run()
    for rank in range(4):
        (folder / f"rank{rank}.json").write_text(json.dumps(job.document(rank)))
    return folder


@pytest.fixture(scope="module")
def expected(undamaged: Path) -> float:
    """The share of the culprit in the undamaged job."""
    return share(loaded(undamaged).whatif())


@pytest.fixture
def folder(undamaged: Path, tmp_path: Path) -> Path:
    """A copy of the undamaged job, for a test to damage."""
    return shutil.copytree(undamaged, tmp_path / "job")


def report_of(folder: Path, rank: int, damage: Callable[[Events], Events]) -> Report:
    """On the job whose rank recorded other events than it should have."""
    path = folder / f"rank{rank}.json"
    document = json.loads(path.read_text())
    document["traceEvents"] = damage(document["traceEvents"])
    path.write_text(json.dumps(document))
    return loaded(folder).whatif()


def share(report: Report) -> float:
    culprit = report.verdict.culprit
    assert culprit is not None
    assert culprit.rank == CULPRIT
    return culprit.saved_s / report.step_time_s.recorded


def without(*categories: str, name: str = "") -> Callable[[Events], Events]:
    return lambda events: [one for one in events if one["cat"] not in categories or not one["name"].startswith(name)]


def every(number: int, categories: tuple[str, ...], **changed: Any) -> Callable[[Events], Events]:
    """A field of every so many events is something else, or missing."""

    def damage(events: Events) -> Events:
        for one in [one for one in events if one["cat"] in categories][::number]:
            one.update(changed)
            for field in [field for field in changed if changed[field] is ...]:
                del one[field]
        return events

    return damage


def args(categories: tuple[str, ...], **changed: Any) -> Callable[[Events], Events]:
    """An argument of every event is something else, or missing."""

    def damage(events: Events) -> Events:
        for one in events:
            if one["cat"] in categories and one["args"].keys() & changed.keys():
                kept = {name: value for name, value in one["args"].items() if name not in changed}
                one["args"] = kept | {name: value for name, value in changed.items() if value is not ...}
        return events

    return damage


#: What can be missing of a rank, and the words that say so.
DAMAGES = {
    "activities=[CUDA]": (without(*HOST, "ac2g"), "no calls of the host"),
    "no marks of steps": (without("user_annotation", name="ProfilerStep"), "marks no steps"),
    "durations that are no numbers": (every(5, GPU, dur=float("nan")), "% of its GPU ops or host calls are damaged"),
    "negative durations": (every(5, HOST, dur=-50.0), "% of its GPU ops or host calls are damaged"),
    "names": (every(5, GPU, name=None), "% of its GPU ops or host calls are damaged"),
    "times": (every(5, HOST, ts=...), "% of its GPU ops or host calls are damaged"),
    "arguments": (every(5, GPU, args=...), "the other half is missing"),
    "all arguments": (every(1, (*GPU, *HOST), args=...), "lack args: no correlation names the launches of 100%"),
    "arguments of most kernels": (
        lambda events: every(1, GPU, args=...)(events[len(events) // 4 :]) and events,
        "lack args: no correlation names the launches of 7",
    ),
    "empty arguments": (every(1, GPU, args={}), "lack args: no correlation names the launches of 100%"),
    "correlation": (args(GPU, correlation=...), "lack args: no correlation names the launches of 100%"),
    "correlation of calls": (args(HOST, correlation=...), "lack args: no correlation names the launches of 100%"),
    "correlations that are all 0": (args((*GPU, *HOST), correlation=0), "lack args: no correlation"),
    "kernels": (without("kernel", name="void"), "the other half is missing"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_a_rank_that_lacks_what_the_comparison_needs_is_left_out_and_named(folder, expected, name):
    """The others are compared as if it had not been recorded; whether it is late itself may not be known."""
    damage, why = DAMAGES[name]
    report = report_of(folder, OTHER, damage)
    assert share(report) == pytest.approx(expected, rel=0.05)
    assert any(f"rank {OTHER} is left out" in doubt and why in doubt for doubt in said(report))
    assert all(f"rank {OTHER}" in doubt for doubt in report.trust.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_a_report_without_the_late_rank_is_not_trusted_and_names_it(folder, name):
    """The others wait for it in what looks like transfers."""
    report = report_of(folder, CULPRIT, DAMAGES[name][0])
    assert report.verdict.culprit is None
    assert any(f"rank {CULPRIT}" in doubt for doubt in report.trust.reasons)


@pytest.mark.parametrize("rank", [OTHER, CULPRIT])
@pytest.mark.parametrize("part", [pytest.param(0.35, marks=pytest.mark.slow), 0.6, 0.9])
def test_a_file_that_is_cut_off_is_compared_over_the_steps_that_all_ranks_have(folder, expected, rank, part):
    """Shares are of these steps; of one step alone, nothing follows for the others."""
    path = folder / f"rank{rank}.json"
    path.write_text(path.read_text()[: int(part * path.stat().st_size)])
    report = loaded(folder).whatif()
    assert share(report) == pytest.approx(expected, rel=0.05)
    assert any(f"rank {rank} did not record the others as a whole" in doubt for doubt in said(report))
    assert bool(report.trust.reasons) == (part < 0.5)


def later_by_two_steps(events: Events) -> Events:
    begin = sorted(one["ts"] for one in events if one["name"].startswith("ProfilerStep"))[2]
    return [one for one in events if one["ts"] >= begin]


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        later_by_two_steps,
        lambda events: events + events[::5],
        every(10**6, GPU, dur=1e9),
        every(10**6, HOST, ts=1e40),
        every(10**6, GPU, ts=4e9),
        args(GPU, stream=..., device=...),
    ],
)
@pytest.mark.parametrize("rank", [OTHER, CULPRIT])
def test_what_can_be_repaired_changes_nothing(folder, expected, rank, damage):
    """Fewer steps, events that are there twice, single ones with impossible times, streams that only `tid` names."""
    report = report_of(folder, rank, damage)
    assert share(report) == pytest.approx(expected, rel=0.05)
    assert not report.trust.reasons


def test_transfers_are_not_to_blame_while_a_rank_is_missing(folder):
    (folder / f"rank{CULPRIT}.json").unlink()
    report = loaded(folder).whatif()
    assert report.verdict.kind is LossKind.COMMUNICATION
    assert any(
        f"may be waiting for rank {CULPRIT}, of which nothing is known" in doubt for doubt in report.trust.reasons
    )


def test_waits_that_nothing_recorded_explains_cost_trust(tmp_path):
    """No rank recorded its host: three ranks wait for the fourth in every step."""
    run = Job(ranks=4, steps=4, layers=4, bucket=2, host_us=30.0, seed=3, troubles=(Trouble(CULPRIT, host=2.5),)).run()
    for events in run.events:
        events[:] = without(*HOST, "ac2g")(events)
    run.write(tmp_path)
    report = loaded(tmp_path).whatif()
    assert report.verdict.culprit is None
    (doubt,) = [doubt for doubt in report.trust.reasons if "nothing recorded says for what" in doubt]
    assert doubt.startswith("3 ranks wait up to")
    assert f"for rank {CULPRIT}" in doubt


def test_a_collective_that_is_missing_between_others_costs_trust(folder):
    """One of eight kernels of rank 1: those behind it are matched with the wrong ones."""

    def damage(events: Events) -> Events:
        gone = [one for one in events if one["name"].startswith("nccl")][3]
        gone["args"]["Process Group Name"] = "another"
        return events

    report = report_of(folder, OTHER, damage)
    assert any(f"rank {OTHER} recorded fewest" in doubt for doubt in report.trust.reasons)


def test_two_ranks_of_which_one_is_damaged_are_compared_but_not_trusted(tmp_path):
    run = Job(ranks=2, steps=3, layers=4, bucket=2, seed=3).run()
    run.events[1][:] = every(5, GPU, dur=float("nan"))(run.events[1])
    run.write(tmp_path)
    report = loaded(tmp_path).whatif()
    assert tuple(row.rank for row in report.by_rank) == (0, 1)
    assert any("rank 1 cannot be compared: up to 21% of its GPU ops" in doubt for doubt in report.trust.reasons)


@pytest.mark.slow
def test_most_ranks_may_lack_what_the_others_are_compared_by(folder):
    for rank in (0, OTHER):
        report = report_of(folder, rank, every(1, GPU, args=...))
    assert tuple(row.rank for row in report.by_rank) == (CULPRIT, 3)
    assert share(report) > 0.2


@pytest.mark.parametrize("lacking", [(0, CULPRIT, 3), (0, 2)])
def test_the_only_rank_with_arguments_is_answered_as_one_rank(folder, lacking):
    for rank in {0, OTHER, CULPRIT, 3}.difference({OTHER, *lacking}):
        (folder / f"rank{rank}.json").unlink()
    for rank in lacking:
        report = report_of(folder, rank, every(1, GPU, args=...))
    assert tuple(row.rank for row in report.by_rank) == (OTHER,)
    for rank in lacking:
        assert any(f"rank {rank} is left out: its events lack args" in doubt for doubt in said(report))


@pytest.mark.slow
def test_no_rank_is_left_out_for_what_all_of_them_lack(folder):
    """As exporters write that know no arguments."""
    for rank in range(4):
        report = report_of(folder, rank, every(1, GPU, args=...))
    assert tuple(row.rank for row in report.by_rank) == (0, 1, 2, 3)
    assert report.trust.reasons


@pytest.mark.parametrize("rank", [CULPRIT, OTHER])
def test_ranks_that_number_their_steps_differently_are_not_trusted(folder, rank):
    def later(events: Events) -> Events:
        for one in events:
            head, mark, number = one["name"].partition("ProfilerStep#")
            one["name"] = f"{head}{mark}{int(number) + 1}" if mark else one["name"]
        return events

    assert any("number their steps differently" in doubt for doubt in report_of(folder, rank, later).trust.reasons)
