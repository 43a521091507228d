"""The sentences about a report.

In: a report, or parts of it, and the map. Out: text and tones for all pages of a job.

Only `headline`, `run_headline`, `first_action` and `host_words` say what is wrong or what to do, and they take it from
the report's `verdict`, `run` and `answer`. All others describe a figure and conclude nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import tzinfo
from enum import StrEnum
from statistics import fmean

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.analysis.attribution.patterns import SpacePattern, TimePattern
from tracekit.base.text import listed, short, sure
from tracekit.dashboards.figures.worker_map import WorkerMap
from tracekit.dashboards.words import run_kind, run_of_several, run_sentence, share_words
from tracekit.report.conclusions import MACHINE_PARTS, Finding, Fix, State, nodes_of
from tracekit.report.finding import UNNAMED, LossKind
from tracekit.report.report import Report
from tracekit.report.tables import OfStep
from tracekit.trace.model import Worker

#: Longer lists are cut.
MOST_NAMED = 6
#: Losses to launch delays: they make a replay fall short of the recording, and are priced with it.
_LAUNCH_DELAYS = (LossKind.INPUT, LossKind.HOST)


class Tone(StrEnum):
    """The meaning of colours on all pages: good is green, bad orange, unsure grey. Values: CSS classes."""

    GOOD = "fine"
    BAD = "slow"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict on a job: a few words for its badge, a sentence, and its tone."""

    badge: str
    sentence: str
    tone: Tone


_UNTRUSTED = " Its figures are not to be trusted."


def headline(report: Report) -> Headline:
    """The verdict of the diagnosis, the same for every page."""
    verdict = report.verdict
    trusted, kind = report.trust.trustworthy, verdict.kind
    badge, sentence = verdict.label.replace("-", " "), _sentence(verdict.sentence)
    if kind is LossKind.CONTRADICTION or not (trusted or _promised_fixes(report)):
        reason = "" if kind is LossKind.CONTRADICTION else _UNTRUSTED
        return Headline("no verdict", f"No verdict.{reason or ' ' + sentence}", Tone.UNSURE)
    if kind is LossKind.MINOR or kind not in (LossKind.BALANCED, *UNNAMED):
        badge += f", {verdict.share:.0%} lost"
    if kind is LossKind.BALANCED or kind in UNNAMED:
        misleading = [cause for cause in named_causes(report) if not costs_time(report, cause)]
        if misleading:
            return Headline(
                badge, f"{sentence} The trace may mislead: {_cause_words(report, misleading[0])}.", Tone.UNSURE
            )
        return Headline(badge, sentence, Tone.UNSURE if kind in UNNAMED else Tone.GOOD)
    return Headline(badge, sentence + ("" if trusted else _UNTRUSTED), Tone.BAD)


def run_headline(report: Report, zone: tzinfo) -> Headline | None:
    """The verdict on a run of several windows; None for a report on one window, or if no window could be judged."""
    run = run_of_several(report)
    if run is None or not run.recorded_s:
        return None
    alarming = run.alarming
    tone = Tone.BAD if any(cause.state is not State.OVER for cause in alarming) else Tone.UNSURE
    badge = f"{str(run_kind(run)).replace('-', ' ')}, {share_words(run, run.lost_s)} lost"
    return Headline(badge, _sentence(run_sentence(run, zone)), tone if alarming else Tone.GOOD)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def costs_time(report: Report, cause: Finding) -> bool:
    """Whether the job loses time to a cause; the trace is at fault for the others, or none was found."""
    return any(account.kind == cause.kind for account in report.answer.accounts)


def named_causes(report: Report) -> list[Finding]:
    """The named causes, the costliest first; for an untrustworthy job, only those that explain why and whose fix is
    promised all the same.
    """
    causes = [cause for cause in report.findings if costs_time(report, cause) or cause.suggested_fix]
    return causes if report.trust.trustworthy else [cause for cause in causes if cause.kind in advised(report)]


def place_words(report: Report, cause: Finding) -> str:
    """The place of a cause: rank and node first, if the report has them; empty for the whole job."""
    places = zip(report.findings, report.answer.places, strict=True)
    words = next((words for place, words in places if place == cause), cause.where_text)
    return "" if words == "whole job" else short(words)


def fix_place(report: Report, fix: Fix) -> str:
    """The place of a fix, in the words for the cause at that place if there is one."""
    for cause in report.findings:
        if cause.where_text == fix.where_text and (words := place_words(report, cause)):
            return words
    return short(str(fix.where_text))


def believed(report: Report, words: str) -> str:
    """`words` about figures of a report, marked if the figures are not trustworthy."""
    return words if report.trust.trustworthy else f"Not trustworthy: {words}"


def first_action(report: Report) -> tuple[str, str] | None:
    """The first action and its saving, in the words of the answer; None without advice."""
    answer = report.answer
    if not answer.action or not (report.trust.trustworthy or _promised_fixes(report)):
        return None
    return answer.action, answer.saves or ""


def advised(report: Report) -> set[str]:
    """The kinds of cause with a promised fix."""
    return {str(fix.cause) for fix in _promised_fixes(report)}


def why_no_advice(report: Report) -> str:
    """The reason why there is no advice."""
    withheld = [fix.withheld for fix in report.fixes if fix.cause and fix.withheld]
    if not report.trust.trustworthy:
        return "the figures are not to be trusted"
    if withheld:
        return str(withheld[0])
    return "no fix for the named cause would save 1% of the step" if named_causes(report) else "no cause is named"


def node_words(report: Report) -> str | None:
    """Advice on draining a node, by the rule of tracekit/report/conclusions.py; None if no node is known, or if no
    machine can be at fault.
    """
    suspects = [culprit for culprit in report.answer.culprits if culprit.hardware or culprit.part in MACHINE_PARTS]
    return nodes_of(suspects, trusted=report.trust.trustworthy).sentence


def host_words(report: Report, workers_map: WorkerMap) -> str:
    """Advice on draining a host. A slow worker is no reason to drain the others of its host."""
    if not workers_map.hosts:
        return "The trace does not name its hosts."
    if not report.trust.trustworthy and not _promised_fixes(report):
        return f"No advice: {why_no_advice(report)}."
    advice = node_words(report)
    for cause in named_causes(report):
        workers = cause.where.workers
        if workers or cause.where.host:
            rest = _host_check(report, cause) if cause.where.host else _workers_words(cause, workers, workers_map)
            return f"{advice or 'No host to drain.'} {rest}"
    return advice or "No host to drain: the diagnosis names no host and no worker."


def _host_check(report: Report, cause: Finding) -> str:
    """The action for a cause on a host, in the words of the answer; without one, the title of the cause."""
    accounts = report.answer.accounts
    words = next((account.fix for account in accounts if account.kind == cause.kind and account.fix), cause.title)
    return f"{words} ({sure(cause.confidence)})."


def _workers_words(cause: Finding, workers: Sequence[Worker], workers_map: WorkerMap) -> str:
    """The workers that the diagnosis names, and the other workers of their host."""
    words = f"The diagnosis names {_listed(workers, workers_map)} ({sure(cause.confidence)})"
    cell = workers_map.cell(workers[0]) if len(workers) == 1 else None
    host = None if cell is None else workers_map.host_name(cell)
    if host is None:
        return f"{words} and no host."
    others = int((workers_map.host == workers_map.hosts.index(host)).sum()) - 1
    if not others:
        return f"{words}, the only one on {short(host)}."
    verb = "worker of it is" if others == 1 else "workers of it are"
    return f"{words} on {short(host)}; the other {others:,} {verb} not named."


def _listed(workers: Sequence[Worker], workers_map: WorkerMap) -> str:
    """Workers by rank; by coordinates where the map has no rank."""
    cells = [(worker, workers_map.cell(worker)) for worker in workers]
    names = [
        None if cell is None or workers_map.rank_of(cell) is None else workers_map.label(cell) for _, cell in cells
    ]
    words = [name or f"({worker.coordinates})" for name, (worker, _) in zip(names, cells, strict=True)]
    return listed(words, MOST_NAMED)


def _cause_words(report: Report, cause: Finding) -> str:
    where = place_words(report, cause)
    place = f", {where}" if where else ""
    costs = f"{cause.costs}, " if costs_time(report, cause) else ""
    return f"{cause.title}{place} ({costs}{sure(cause.confidence)})"


def _promised_fixes(report: Report) -> list[Fix]:
    """The promised fixes for a named cause, best first.

    For an untrustworthy job, those of the leading cause if launch delays are the loss: they are why the replay falls
    short.
    """
    promised = [fix for fix in report.fixes if fix.cause is not None and fix.withheld is None]
    if report.trust.trustworthy:
        return promised
    leading = [account.kind for account in report.answer.accounts[:1]]
    return [fix for fix in promised if report.verdict.kind in _LAUNCH_DELAYS and fix.cause in leading]


# --- figures in words, without a conclusion -------------------------------------------------------------------------


def space_words(space: SpacePattern, workers_map: WorkerMap) -> str:
    """The slow workers on the map, the shape that they form, and how often the slowest one is the same."""
    workers = space.workers
    names = _listed(workers, workers_map)
    host = f" on {short(space.host)}" if space.host else ""
    largest = 1 - 1 / float(workers_map.slowdown.max())
    stays = f"The same worker is the slowest in {space.stays:.0%} of the steps."
    if workers_map.slowdown.size == 1:
        return "The job has one worker: there is no peer to compare it with."
    match space.shape:
        case "none":
            return f"No worker stands out: none alone costs more than {largest:.1%} of a step."
        case "one-worker":
            return f"One worker stands out: {names}{host}, which alone costs {largest:.1%} of a step. {stays}"
        case "one-host" if workers_map.only_host is not None:
            is_all = len(workers) == workers_map.slowdown.size
            which = f"All {len(workers):,} workers" if is_all else f"Several workers ({names})"
            return f"{which} of the only host of the job, {short(workers_map.only_host)}, stand out. {stays}"
        case "one-host":
            return f"Workers of one host stand out, {short(str(space.host))}: {names}. {stays}"
        case "one-stage":
            return f"One stage stands out on nearly every DP rank: stage {workers[0].pp_rank}."
        case "one-dp-rank":
            return f"One DP rank stands out on nearly every stage: DP rank {workers[0].dp_rank}. {stays}"
        case "several-workers":
            return f"Several workers stand out: {names}. {stays}"
        case _:
            return (
                "The slowest worker changes from step to step; over all steps, none alone costs more than"
                f" {largest:.1%}."
            )


def time_words(pattern: TimePattern, by_step: Sequence[OfStep]) -> str:
    """The course of the loss over the steps. `by_step`: the rows of that table of the report."""
    if len(by_step) == 1:
        return "One step was traced: since when cannot be said."
    steps = listed(map(str, pattern.slow_steps), MOST_NAMED)
    shares = {row.step: row.lost_share for row in by_step}
    low, high = min(shares.values()), max(shares.values())
    match pattern.shape:
        case "none":
            return f"What steps lose shows no pattern: {low:.1%} to {high:.1%} of each."
        case "persistent":
            slow = sum(share >= VERDICT.headline_share for share in shares.values())
            if 0 < slow < len(by_step):
                return (
                    "The loss comes and goes from the first step on: it is"
                    f" {VERDICT.headline_share:.0%} or more in {slow:,} of {len(by_step):,} steps."
                )
            return f"Every step loses time, from the first one on: {low:.1%} to {high:.1%}."
        case "changed":
            since = pattern.since_step or 0
            before, after = (
                fmean(share for step, share in shares.items() if (step < since) is early) for early in (True, False)
            )
            verb = "rose" if after > before else "fell"
            return f"The loss {verb} at step {since}, from {before:.1%} of a step on average to {after:.1%}."
        case "drifting":
            return "The loss drifts: it grows or shrinks steadily over the steps."
        case "periodic":
            slow_ones = f" (slow: {steps})" if steps else ""
            return f"The loss rises every {pattern.period} steps{slow_ones}."
        case _:
            return f"Single slow steps: {steps}. All others run at the usual speed."
