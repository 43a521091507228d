"""Sentences about a report.

In: a report (docs/report-schema.md), or parts of it, and the map. Out: text and tones for all pages of a job.

Only `headline`, `diagnosis_words`, `advice_words`, `first_action` and `host_words` name causes and actions, and they
take them from the diagnosis: its causes and fixes, with their confidence. All others describe a figure without a
conclusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

from tracekit.analysis.gpu.remedy import OF_ALL

from tracekit.analysis.attribution.attribution import STRAGGLING_SLOWDOWN
from tracekit.base.text import cost, seconds, short, sure
from tracekit.report.nodes import nodes_of
from tracekit.report.verdict import LossKind
from tracekit.report.worker_map import WorkerMap
from tracekit.trace.model import COMMUNICATION, OpKind, ReportedKind, Worker

#: Most items of a list in a sentence.
MOST_NAMED = 6
#: Kinds grouped by the part of the system to inspect.
_NETWORK = {*map(str, COMMUNICATION), *map(str, ReportedKind)}
_HOST = {str(kind) for kind in (OpKind.GC, OpKind.DATA_LOAD, OpKind.CHECKPOINT, OpKind.HOST_DELAY)}
#: Microbatches whose forward and backward correlate by this much are marked.
SAME_MICROBATCHES = 0.9
#: Kinds of cause that mean that there is none.
NO_CAUSE = ("healthy", "unexplained")
#: Causes of launch delays, which make a replay shorter than the recording and are priced by the difference.
OF_LAUNCH_DELAYS = ("late-data-loading", "host-bound-launch")

Report = Mapping[str, Any]


class Tone(StrEnum):
    """The meaning of a statement's colour on all pages: `good` green, `bad` orange, `unsure` grey."""

    GOOD = "good"
    BAD = "bad"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict on a job: a few words for its badge, a sentence, and its tone."""

    badge: str
    sentence: str
    tone: Tone


def headline(report: Report) -> Headline:
    """The verdict of the diagnosis, the same for every page."""
    verdict, figure = report["verdict"], f"slowdown {report['slowdown']:.3f}"
    trusted, kind = report["trust"]["trustworthy"], LossKind(verdict["kind"])
    badge = str(verdict.get("label", kind)).replace("-", " ")  # stores of older versions have no label
    sentence = _sentence(verdict["sentence"])
    if kind is LossKind.CONTRADICTION or not (trusted or _promised(report)):
        reason = "" if kind is LossKind.CONTRADICTION else f" The {figure} is not to be trusted."
        return Headline(f"no verdict, {figure}", f"No verdict.{reason or ' ' + sentence}", Tone.UNSURE)
    if kind is not LossKind.BALANCED:
        badge += f", {verdict['share']:.0%} lost"
    if kind in {LossKind.BALANCED, LossKind.MINOR}:
        misleading = [cause for cause in named_causes(report) if not _costs(cause)]
        if misleading:
            return Headline(
                badge, f"{sentence} The trace may mislead: {_cause_words(report, misleading[0])}.", Tone.UNSURE
            )
        return Headline(badge, sentence, Tone.UNSURE if kind is LossKind.MINOR else Tone.GOOD)
    cost_below = (report.get("answer") or {}).get("cost")
    lost = "" if cost_below else f" {verdict['lost_gpu_hours_per_day']:,.0f} GPU-hours a day at this rate."
    unsure = "" if trusted else f" The {figure} is not to be trusted."
    return Headline(badge, sentence + lost + unsure, Tone.BAD)


def op_headline(report: Report) -> Headline:
    """The verdict on an op trace, whose report names no cause, or on a recording of GPUs, whose report names a rank."""
    if "recording_time_s" in report:
        return _gpu_headline(report)
    if report["slowdown"] is None:
        return Headline("no verdict", "No verdict: without stragglers the job would take no time.", Tone.UNSURE)
    figure, trusted = f"slowdown {report['slowdown']:.3f}", report["trust"]["trustworthy"]
    if not trusted:
        return Headline(f"no verdict, {figure}", f"No verdict. The {figure} is not to be trusted.", Tone.UNSURE)
    rest = (report.get("parts") or {}).get("sentence")  # reports of older stores have none
    if not report["straggling"] and rest:
        return Headline(figure, _sentence(f"{figure}: {rest}"), Tone.UNSURE)
    if not report["straggling"]:
        return Headline(f"no straggler, {figure}", f"No straggler: {figure}.", Tone.GOOD)
    times = report["step_time_s"]
    lost = f"{seconds(times['original'] - times['ideal'])} of every {seconds(times['original'])} step"
    sentence = (
        f"Stragglers cost {lost}: {figure}. {report['wasted_gpu_hours_per_day']:,.0f} GPU-hours a day at this rate."
    )
    return Headline(f"straggling, {figure}", sentence, Tone.BAD)


def _gpu_headline(report: Report) -> Headline:
    culprit, sentence = report["verdict"]["culprit"], _sentence(report["verdict"]["sentence"])
    if not report["trust"]["trustworthy"]:
        return Headline("no verdict", f"No verdict: the numbers are not to be trusted. {sentence}", Tone.UNSURE)
    kind = report["verdict"].get("kind")  # reports of older stores name none
    if kind is None:
        slow = culprit is not None
        return Headline(
            f"slow rank {culprit['rank']}" if slow else "no slow rank", sentence, Tone.BAD if slow else Tone.GOOD
        )
    if kind == LossKind.BALANCED:
        return Headline(str(kind), sentence, Tone.GOOD)
    badge = f"{kind.replace('-', ' ')}, {report['verdict']['share']:.0%} lost"
    return Headline(badge, sentence, Tone.UNSURE if kind == LossKind.MINOR else Tone.BAD)


def gpu_culprit(report: Report) -> str | None:
    """The rank that a recording of GPUs waits for, with its host; the verdict's own name for it if there is one."""
    if who := (report.get("verdict") or {}).get("who"):
        return short(who)
    culprit = (report.get("verdict") or {}).get("culprit")
    if not culprit:
        return None
    return f"rank {culprit['rank']}" + (f" on {short(culprit['host'])}" if culprit["host"] else "")


def gpu_cost(report: Report) -> str | None:
    """The cost of the culprit, in words; None in reports of older stores."""
    verdict = report.get("verdict") or {}
    cost: str | None = verdict.get("cost") or (verdict.get("culprit") or {}).get("cost")
    return cost


def gpu_action(report: Report) -> tuple[str, str] | None:
    """The first action for the culprit rank and its saving; None without advice.

    Reports of older stores have no words for it.
    """
    verdict = report.get("verdict") or {}
    causes = (verdict.get("culprit") or {}).get("causes") or [{}]
    if not report["trust"]["trustworthy"]:
        return None
    if verdict.get("kind") in OF_ALL and verdict["action"]:
        return verdict["action"], ""
    if "action" not in causes[0]:
        return None
    recorded = seconds(report["recording_time_s"]["recorded"])
    return causes[0]["action"], f"{seconds(causes[0]['saved_s'])} of the {recorded} recorded"


def _sentence(text: str) -> str:
    """Give `text` a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def named_causes(report: Report) -> list[Mapping[str, Any]]:
    """The named causes, the costliest first; for an untrustworthy job, only those that explain why and whose fix is
    promised all the same.
    """
    named = [cause for cause in report["causes"] if cause["kind"] not in NO_CAUSE]
    return named if report["trust"]["trustworthy"] else [cause for cause in named if cause["kind"] in advised(report)]


def place_words(report: Report, cause: Mapping[str, Any]) -> str:
    """The place of a cause: rank and node first, if the report has them; empty for the whole job."""
    places = (report.get("answer") or {}).get("places") or []
    known = [words for one, words in zip(report["causes"], places, strict=False) if one == cause]
    words = known[0] if known else cause["where_text"]
    return "" if words == "whole job" else short(words)


def fix_place(report: Report, fix: Mapping[str, Any]) -> str:
    """The place of a fix, in the words for the cause at that place if there is one."""
    for cause in report["causes"]:
        if cause["where_text"] == fix["where_text"] and (words := place_words(report, cause)):
            return words
    return short(str(fix["where_text"]))


def believed(report: Report, words: str) -> str:
    """`words` about figures of a report, marked if the figures are not trustworthy."""
    return words if report["trust"]["trustworthy"] else f"Not trustworthy: {words}"


def diagnosis_words(report: Report) -> str:
    """The verdict and the further causes, worded as on the page Job."""
    if not report["trust"]["trustworthy"] and not _promised(report):
        return f"Not trustworthy: {_distrust(report)}."
    answer = report.get("answer")
    if answer is not None:
        others = f" Also: {'; '.join(answer['others'])}." if answer["others"] else ""
        return headline(report).sentence + others
    if named := named_causes(report):
        return f"Diagnosis: {'; '.join(_cause_words(report, cause) for cause in named)}."
    return "Diagnosis: slow, and no known cause fits." if report["straggling"] else "Diagnosis: no cause named."


def advice_words(report: Report) -> list[str]:
    """The first action, its saving and the confidence of its cause; the reason if there is no action."""
    if (first := first_action(report)) is not None:
        confidence = report["verdict"].get("confidence")
        certain = "" if confidence is None else f" ({sure(confidence)})"
        return [f"Do this first: {first[0]}{f'; {first[1]}' if first[1] else ''}{certain}."]
    return _advice_of_fixes(report)


def _advice_of_fixes(report: Report) -> list[str]:
    """The advice of reports of older stores, which contain no words for it."""
    step_s, promised, advice = report["step_time_s"]["recorded"], _promised(report), []
    for cause in named_causes(report):
        fixes = [fix for fix in promised if fix["cause"] == cause["kind"]]
        here = [fix for fix in fixes if fix["where_text"] == cause["where_text"]]
        for fix in (here or fixes)[:1]:
            assumed = f"; assumes {fix['assumes']}" if fix["assumes"] else ""
            saved = f"saves {seconds(fix['saved_s'])} of every {seconds(step_s)} step"
            advice.append(f"{fix['title']} ({sure(fix['confidence'])}; {saved}{assumed}).")
    if advice and not report["trust"]["trustworthy"]:
        advice.append("No other advice: all else below rests on figures that are not to be trusted.")
    return advice or [f"No advice: {why_no_advice(report)}."]


def first_action(report: Report) -> tuple[str, str] | None:
    """The first action and its saving, in the words of the answer; None without advice."""
    answer = report.get("answer") or {}
    if not answer.get("action") or not (report["trust"]["trustworthy"] or _promised(report)):
        return None
    return answer["action"], answer["saves"] or ""


def advised(report: Report) -> set[str]:
    """The kinds of cause with a promised fix."""
    return {str(fix["cause"]) for fix in _promised(report)}


def why_no_advice(report: Report) -> str:
    """The reason why there is no advice."""
    withheld = [fix["withheld"] for fix in report["fixes"] if fix.get("cause") and fix["withheld"]]
    if not report["trust"]["trustworthy"]:
        return "the figures are not to be trusted"
    if withheld:
        return str(withheld[0])
    return "no fix for the named cause would save 1 % of the step" if named_causes(report) else "no cause is named"


def node_words(report: Report) -> str | None:
    """Advice on draining a node, by the shared rule of tracekit/report/nodes.py; None if no node is known."""
    culprits = (report.get("answer") or {}).get("culprits") or []
    return nodes_of(culprits, trusted=report["trust"]["trustworthy"]).sentence


def host_words(report: Report, found: WorkerMap) -> str:
    """Advice on draining a host. A slow worker is no reason to drain the others of its host."""
    if not found.hosts:
        return "The trace does not name its hosts."
    if not report["trust"]["trustworthy"] and not _promised(report):
        return f"No advice: {why_no_advice(report)}."
    advice = node_words(report)
    for cause in named_causes(report):
        workers = [Worker(each["dp_rank"], each["pp_rank"]) for each in cause["where"]["workers"]]
        if workers:
            rest = _host_check(report, cause) if cause["kind"] == "slow-host" else _on(cause, workers, found)
            return f"{advice or 'No host to drain.'} {rest}"
    return advice or "No host to drain: the diagnosis names no host and no worker."


def _host_check(report: Report, cause: Mapping[str, Any]) -> str:
    """The action for a slow host, in the words for its cause; in reports of older stores the title of the cause."""
    accounts = (report.get("answer") or {}).get("accounts") or []
    words = next((one["fix"] for one in accounts if one["kind"] == cause["kind"] and one["fix"]), cause["title"])
    return f"{words} ({sure(cause['confidence'])})."


def _on(cause: Mapping[str, Any], workers: Sequence[Worker], found: WorkerMap) -> str:
    """The workers that the diagnosis names, and the other workers of their host."""
    words = f"The diagnosis names {_listed(workers, found)} ({sure(cause['confidence'])})"
    cell = found.cell(workers[0]) if len(workers) == 1 else None
    host = None if cell is None else found.host_name(cell)
    if host is None:
        return f"{words} and no host."
    others = int((found.host == found.hosts.index(host)).sum()) - 1
    if not others:
        return f"{words}, the only one on {short(host)}."
    verb = "worker of it is" if others == 1 else "workers of it are"
    return f"{words} on {short(host)}; the other {others:,} {verb} not named."


def _listed(workers: Sequence[Worker], found: WorkerMap) -> str:
    """Workers by rank; by coordinates where the map has no rank."""
    cells = [(worker, found.cell(worker)) for worker in workers]
    named = [None if cell is None or found.rank_of(cell) is None else found.label(cell) for _, cell in cells]
    return listed([name or f"({worker.coordinates})" for name, (worker, _) in zip(named, cells, strict=True)])


def _costs(cause: Mapping[str, Any]) -> bool:
    return max(cause["saved_s"], cause["alone_s"]) > 0


def _cause_words(report: Report, cause: Mapping[str, Any]) -> str:
    """One cause: its name, place, cost and confidence."""
    where = place_words(report, cause)
    place = f", {where}" if where else ""
    costs = f"{cost(cause['saved_s'], cause['alone_s'])}, " if _costs(cause) else ""
    return f"{cause['title']}{place} ({costs}{sure(cause['confidence'])})"


def _distrust(report: Report) -> str:
    return "; ".join(report["trust"]["reasons"]) or "the replay does not explain the recording"


def _promised(report: Report) -> list[Mapping[str, Any]]:
    """The promised fixes for a named cause, best first; empty for reports of an earlier version."""
    trusted = report["trust"]["trustworthy"]
    kept = [fix for fix in report["fixes"] if fix.get("cause") is not None and fix["withheld"] is None]
    return [fix for fix in kept if trusted or fix["cause"] in OF_LAUNCH_DELAYS]


# --- figures in words, without a conclusion -------------------------------------------------------------------------


def space_words(space: Mapping[str, Any], found: WorkerMap) -> str:
    """The slow workers on the map, the shape that they form, and how often the slowest one is the same."""
    workers = [Worker(one["dp_rank"], one["pp_rank"]) for one in space["workers"]]
    named = _listed(workers, found)
    host = f" on {short(space['host'])}" if space["host"] else ""
    largest = float(found.slowdown.max())
    stays = f"The same worker is the slowest in {space['stays']:.0%} of the steps."
    if found.slowdown.size == 1:
        return "One worker: there is nobody to compare it with."
    match space["shape"]:
        case "none":
            return f"No worker stands out: the largest slowdown alone is {largest:.3f}."
        case "one-worker":
            return f"One worker stands out: {named}{host}, with a slowdown alone of {largest:.3f}. {stays}"
        case "one-host" if found.only_host is not None:
            everyone = len(workers) == found.slowdown.size
            which = f"All {len(workers):,} workers" if everyone else f"Several workers ({named})"
            return f"{which} of the only host of the job, {short(found.only_host)}, stand out. {stays}"
        case "one-host":
            return f"Workers of one host stand out, {short(space['host'])}: {named}. {stays}"
        case "one-stage":
            return f"One stage stands out on nearly every DP rank: stage {workers[0].pp_rank}."
        case "one-dp-rank":
            return f"One DP rank stands out on nearly every stage: DP rank {workers[0].dp_rank}. {stays}"
        case "several-workers":
            return f"Several workers stand out: {named}. {stays}"
        case _:
            return (
                f"The slowest worker changes from step to step (largest slowdown alone over all steps: {largest:.3f})."
            )


def time_words(pattern: Mapping[str, Any], by_step: Sequence[Mapping[str, Any]]) -> str:
    """The slowdown over the steps. `by_step`: the rows of that table of the report."""
    if len(by_step) == 1:
        return "One step was traced: since when cannot be said."
    steps = listed([str(step) for step in pattern["slow_steps"]])
    values = [row["slowdown"] for row in by_step]
    match pattern["shape"]:
        case "none":
            return f"The slowdown shows no pattern over the steps: {min(values):.3f} to {max(values):.3f}."
        case "persistent":
            slow = sum(value >= STRAGGLING_SLOWDOWN for value in values)
            if 0 < slow < len(by_step):
                return (
                    "The slowdown comes and goes from the first step on: it is 1.1 or more in"
                    f" {slow:,} of {len(by_step):,} steps."
                )
            return (
                f"The slowdown is raised in every step, from the first one on: {min(values):.3f} to {max(values):.3f}."
            )
        case "changed":
            since = pattern["since_step"]
            before, after = (
                fmean(row["slowdown"] for row in by_step if (row["step"] < since) is early) for early in (True, False)
            )
            way = "rose" if after > before else "fell"
            return f"The slowdown {way} at step {since}, from {before:.2f} on average to {after:.2f}."
        case "drifting":
            return "The slowdown drifts: it grows or shrinks steadily over the steps."
        case "periodic":
            slow_ones = f" (slow: {steps})" if steps else ""
            return f"The slowdown rises every {pattern['period']} steps{slow_ones}."
        case _:
            return f"Single slow steps: {steps}. All others run at the usual speed."


def listed(items: Sequence[str]) -> str:
    """List the first few of `items` and the number of the rest."""
    more = f" and {len(items) - MOST_NAMED:,} more" if len(items) > MOST_NAMED else ""
    return ", ".join(items[:MOST_NAMED]) + more


def kinds_words(report: Report) -> str:
    """Savings of ideal compute, communication and host work, each kind alone, next to the whole loss."""
    times, trust = report["step_time_s"], report["trust"]
    saved = {"compute": 0.0, "communication": 0.0, "host work": 0.0}
    for row in report["by_kind"]:
        group = "communication" if row["kind"] in _NETWORK else "host work" if row["kind"] in _HOST else "compute"
        saved[group] += row["saved_s"]
    parts = ", ".join(f"{group} {seconds(saved[group])}" for group in sorted(saved, key=lambda group: -saved[group]))
    return (
        f"All ideal, a step takes {seconds(times['ideal'])} instead of {seconds(times['original'])}. Saved by each kind"
        f" ideal alone, added up: {parts}. Launch delays, left out here, add {trust['discrepancy']:.1%} to the step."
    )


def correlation_words(report: Report) -> str:
    """The stages whose forwards and backwards of a microbatch are long together, and the diagnosis of it."""
    rows = report["forward_backward_correlation"]
    high = [str(row["pp_rank"]) for row in rows if row["r"] is not None and row["r"] >= SAME_MICROBATCHES]
    if not high:
        where = f"r reaches {SAME_MICROBATCHES} on no stage."
    elif len(high) == len(rows):
        where = f"r reaches {SAME_MICROBATCHES} on every stage."
    else:
        where = f"r reaches {SAME_MICROBATCHES} on stage {listed(high)} of {len(rows):,}."
    kind = "sequence-length-imbalance"
    found = [cause for cause in named_causes(report) if cause["kind"] == kind]
    verdict = f"names sequence lengths ({sure(found[0]['confidence'])})" if found else "does not name sequence lengths"
    return f"{where} The diagnosis {verdict}."
