"""Whether tracekit's verdicts hold on jobs of a simulator that shares no model with it.

python -m benchmarks eventsim                               the table of RESULTS.md
python -m benchmarks eventsim --seed 1 --count 3 --case P3  chosen jobs; with --count 1 also what was said of each
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import tracekit
from benchmarks.eventsim import CASES, draw_job, simulate, truths
from benchmarks.judging import Judgement, judge, must_find
from benchmarks.measure import table
from tracekit.base.errors import TracekitError

#: For the published table only: make rules at other seeds.
SEED, COUNT, HEALTHY = 9_800_000, 3, 60
HEALTHY_CASES = ("healthy", "healthy-noisy", "healthy-lockstep", "healthy-loop")
#: Nobody is to be blamed in these either.
BLAMELESS = (*HEALTHY_CASES, "healthy-nvlink", "P14", "P15", "P19", "clock")


def section() -> str:
    """The Markdown of this section."""
    judged = list(corpus(SEED, COUNT, HEALTHY, tuple(CASES)))
    intro = (
        f"Jobs of the event-driven simulator (`benchmarks/eventsim`), seeds from {SEED} on, {COUNT} per case,"
        f" {HEALTHY} healthy.\nTruth: the same job run again without the cause, or with the fix. A cause must be found"
        " where it costs 5 % of the step or more."
    )
    return "\n\n".join(["## Verdicts on an independent simulator", intro, report(judged)])


def main(arguments: Sequence[str]) -> None:
    """Print the table for chosen jobs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks eventsim", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the first job of each case")
    parser.add_argument("--count", type=int, default=COUNT, help="jobs per case")
    parser.add_argument("--healthy", type=int, help="healthy jobs (default: as many as of any case)")
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="a case; repeat it for several")
    chosen = parser.parse_args(arguments)
    healthy = chosen.count * len(HEALTHY_CASES) if chosen.healthy is None else chosen.healthy
    judged = []
    for judgement in corpus(chosen.seed, chosen.count, healthy, tuple(chosen.case or CASES)):
        judged.append(judgement)
        if chosen.count == 1 and chosen.case:
            print(_described(judgement), end="\n\n")
    print(report(judged))


def corpus(seed: int, count: int, healthy: int, cases: Sequence[str]) -> Iterator[Judgement]:
    """Draw jobs, analyse each, judge what was said."""
    for case in cases:
        jobs = -(-healthy // len(HEALTHY_CASES)) if case in HEALTHY_CASES else count
        for number in range(jobs):
            yield judged_job(seed + number, case)


def judged_job(seed: int, case: str) -> Judgement:
    """One job."""
    job = draw_job(seed, case)
    simulated, found = simulate(job), tuple(truths(job))
    step_s = float(simulated.step_s.mean())
    try:
        said = tracekit.Job(simulated.trace).whatif().to_dict()
    except TracekitError as error:
        return Judgement(job, step_s, found, problem=str(error), must=must_find(found, step_s))
    return judge(job, found, said)


@dataclass(frozen=True)
class Totals:
    """Counts and errors over many jobs."""

    judged: tuple[Judgement, ...]

    @property
    def right(self) -> int:
        return sum(len(one.right) for one in self.judged)

    @property
    def wrong(self) -> int:
        return sum(len(one.wrong) for one in self.judged)

    @property
    def must(self) -> int:
        return sum(len(one.must) for one in self.judged)

    @property
    def found(self) -> int:
        return sum(len(one.found) for one in self.judged)

    @property
    def blamed(self) -> int:
        """Jobs in which nobody is to be blamed and somebody was."""
        return sum(bool(one.wrong) for one in self.judged if case_of(one) in BLAMELESS)

    @property
    def cause_errors(self) -> list[float]:
        return [error for one in self.judged for error in one.cause_errors]

    @property
    def fix_errors(self) -> list[float]:
        return [error for one in self.judged for error in one.fix_errors]


def case_of(judgement: Judgement) -> str:
    """The case a job was drawn from."""
    return judgement.job.name.rpartition("-")[0]


def report(judged: Iterable[Judgement]) -> str:
    """Totals, the table per case, and the misses by name with the command that shows each."""
    judged = tuple(judged)
    cases = dict.fromkeys(map(case_of, judged))
    rows = [_row(case, Totals(tuple(one for one in judged if case_of(one) == case))) for case in cases]
    header = [
        "case", "jobs", "S", "trusted", "must", "found", "wrongly named", "cause price error", "fix price error",
        "its 95th percentile",
    ]  # fmt: skip
    misses = [line for one in judged if (line := _miss(one)) is not None]
    parts = [_totals(Totals(judged)), table(header, rows)]
    if misses:
        parts.append("Misses:\n\n" + "\n".join(misses))
    return "\n\n".join(parts)


def _totals(total: Totals) -> str:
    blameless = sum(case_of(one) in BLAMELESS for one in total.judged)
    fixes = total.fix_errors
    right = [cause for one in total.judged for cause in one.right]
    return "\n".join(
        [
            f"- Jobs: {len(total.judged)}; without a report: {sum(one.problem is not None for one in total.judged)}",
            (
                f"- Precision: **{_ratio(total.right, total.right + total.wrong)}** ({total.right} right, {total.wrong}"
                " wrong)"
            ),
            f"- Recall: **{_ratio(total.found, total.must)}** ({total.found} of {total.must})",
            f"- Right about when it acts: {sum(not cause.mistimed for cause in right)} of {len(right)} rightly named",
            f"- Blamed although nobody is at fault: **{total.blamed}** of {blameless} jobs",
            (
                f"- Price of a cause rightly named: median {_quantile(total.cause_errors, 0.5)}, 95 % within"
                f" {_quantile(total.cause_errors, 0.95)} of the step ({len(total.cause_errors)})"
            ),
            (
                f"- Price of a fix: median **{_quantile(fixes, 0.5)}**, 95 % within **{_quantile(fixes, 0.95)}** of the"
                f" step ({len(fixes)})"
            ),
        ]
    )


def _row(case: str, total: Totals) -> list[str]:
    judged = total.judged
    return [
        case, str(len(judged)), f"{np.mean([one.slowdown for one in judged]):.2f}",
        str(sum(one.trusted for one in judged)), str(total.must), str(total.found), str(total.wrong),
        _quantile(total.cause_errors, 0.5), _quantile(total.fix_errors, 0.5), _quantile(total.fix_errors, 0.95),
    ]  # fmt: skip


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"


def _quantile(errors: Sequence[float], share: float) -> str:
    return f"{np.quantile(errors, share):.2%}" if errors else "-"


def _miss(one: Judgement) -> str | None:
    """What is wrong with a job's report, None where nothing is."""
    parts = [] if one.problem is None else [f"no report: {one.problem}"]
    parts += [f"missed {truth.kind} ({truth.saved_s / one.step_s:.0%})" for truth in one.missed]
    parts += [f"{'misplaced' if cause.misplaced else 'wrong'} {cause.kind} at {cause.place}" for cause in one.wrong]
    parts += [
        f"{cause.kind} at {cause.place} mistimed: {cause.timing or 'always'}" for cause in one.right if cause.mistimed
    ]
    parts += [
        f"{fix.kind} priced {fix.promised_s / one.step_s:.1%}, truth {fix.truth_s / one.step_s:.1%}"
        for fix in one.fixes
        if abs(fix.promised_s - fix.truth_s) > 0.03 * one.step_s
    ]
    if not parts:
        return None
    case, _, seed = one.job.name.rpartition("-")
    return f"- {'; '.join(parts)}: `python -m benchmarks eventsim --case '{case}' --seed {seed} --count 1`"


def _described(one: Judgement) -> str:
    """A job, the truth, and what was said of it."""
    job, shape = one.job, one.job.shape
    lines = [
        (
            f"{job.name}: dp {shape.dp} pp {shape.pp} vpp {shape.vpp} tp {shape.tp}, {shape.microbatches} microbatches,"
            f" {shape.steps} steps, {job.schedule}, receives {job.posting}, host {job.host.mode},"
            f" step {one.step_s:.4f} s, S {one.slowdown:.3f}, {'trusted' if one.trusted else 'not trusted'}"
        )
    ]
    lines += [f"  truth  {truth.saved_s / one.step_s:7.2%}  {truth.kind}  {truth.cause}" for truth in one.truths]
    lines += [
        f"  named  {cause.saved_s / one.step_s:7.2%}  {cause.kind} at {cause.place}"
        f"{f', {cause.timing}' if cause.timing else ''}{' (mistimed)' if cause.mistimed else ''}"
        f"{'' if cause.truths else ' (misplaced)' if cause.misplaced else ' (wrong)'}"
        for cause in one.named
    ]
    lines += [
        f"  fix    {fix.promised_s / one.step_s:7.2%}  {fix.title}: truth {fix.truth_s / one.step_s:.2%}"
        for fix in one.fixes
    ]
    if one.problem:
        lines.append(f"  no report: {one.problem}")
    return "\n".join(lines)
