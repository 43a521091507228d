"""What-if questions of the dashboard and their form in the address.

In: text from a field or an address. Out: `WhatifQuery`, from which a `Scenario` is made, and the questions that a
report suggests. Selections use the syntax of `whatif --fix` and `--keep`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tracekit.analysis.whatif.scenario import Action, Base, Edit, Scenario
from tracekit.analysis.whatif.selection import Selection
from tracekit.analysis.whatif.selection_text import parse_selection
from tracekit.base.errors import SelectionError
from tracekit.base.text import short
from tracekit.trace.model import DP_COLLECTIVES, Worker

#: Longer selections are refused: no user types one.
LONGEST_SELECTION = 1000
#: Questions kept side by side.
MOST_KEPT = 12
#: Most parts of an address that are parsed for them.
MOST_PARTS = 100
#: Longest address: servers and proxies refuse longer ones, gunicorn those above 8,190 characters.
LONGEST_ADDRESS = 7500
LARGEST_FACTOR = 100.0
#: Most workers that a suggestion names one by one.
MOST_WORKERS = 8


class QueryAction(StrEnum):
    """The action on the selected ops: `idealise` is `whatif --fix`, `keep` is `whatif --keep`."""

    IDEALISE = "idealise"
    SCALE = "scale"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class WhatifQuery:
    """One question: the selection as text, the action and, for `scale`, the factor."""

    selection: str
    action: QueryAction = QueryAction.IDEALISE
    factor: float = 1.0

    def scenario(self, selection: Selection) -> Scenario:
        """Return the scenario to replay; `selection` is the parsed selection of this question."""
        match self.action:
            case QueryAction.IDEALISE:
                return Scenario.removal(selection)
            case QueryAction.KEEP:
                return Scenario.addition(selection)
            case QueryAction.SCALE:
                return Scenario(Base.ORIGINAL, (Edit(selection, Action.SCALE, self.factor),))

    def __str__(self) -> str:
        """The question in words."""
        match self.action:
            case QueryAction.IDEALISE:
                return f"{self.selection} ideal"
            case QueryAction.KEEP:
                return f"only {self.selection} as recorded, all else ideal"
            case QueryAction.SCALE:
                return f"{self.selection} takes {self.factor:g} times as long"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A suggested question about this job, with a short title."""

    title: str
    query: WhatifQuery


def read_query(selection: str, action: str | None = None, factor: object = None) -> WhatifQuery:
    """Parse a question from a form or an address. Raises SelectionError with the reason if it is invalid."""
    text = " ".join(selection.split())
    if len(text) > LONGEST_SELECTION:
        raise SelectionError(f"the selection has {len(text):,} characters; expected at most {LONGEST_SELECTION:,}")
    try:
        chosen = QueryAction(action or QueryAction.IDEALISE)
    except ValueError:
        raise SelectionError(f"action {action!r:.40} is not known; expected {', '.join(QueryAction)}") from None
    parse_selection(text)
    return WhatifQuery(text, chosen, _factor(factor) if chosen is QueryAction.SCALE else 1.0)


def kept_text(questions: Iterable[WhatifQuery]) -> str:
    """Join questions into one address text; selections contain no semicolons."""
    return ";".join(
        f"{query.action}{f'*{query.factor:g}' if query.action is QueryAction.SCALE else ''}:{query.selection}"
        for query in questions
    )


def read_kept(text: str) -> tuple[tuple[WhatifQuery, ...], tuple[str, ...]]:
    """Parse the output of `kept_text`, without duplicates; also return the problems found."""
    questions: list[WhatifQuery] = []
    problems: list[str] = []
    for part in filter(None, text.split(";", MOST_PARTS)[:MOST_PARTS]):
        match = re.fullmatch(r"([a-z]+)(?:\*([^:]*))?:(.*)", part, re.DOTALL)
        if not match:
            problems.append(f"{part!r:.60} is no kept scenario; expected for example `idealise:worker=1,2`")
            continue
        try:
            query = read_query(match[3], match[1], match[2])
        except SelectionError as error:
            problems.append(str(error))
            continue
        if query not in questions:
            questions.append(query)
    if len(questions) > MOST_KEPT:
        problems.append(f"{len(questions)} scenarios are kept in the address; the first {MOST_KEPT} are shown")
    return tuple(questions[:MOST_KEPT]), tuple(problems[:3])


def suggestions(report: Mapping[str, Any]) -> tuple[Suggestion, ...]:
    """Suggest questions for the job: its causes and fixes first, then questions that separate compute from network."""
    found: dict[WhatifQuery, Suggestion] = {}
    for suggestion in (*_of_causes(report), *_of_fixes(report), *_general(report)):
        found.setdefault(suggestion.query, suggestion)
    return tuple(found.values())


def question_of(report: Mapping[str, Any], fix: Mapping[str, Any]) -> Suggestion | None:
    """Return the question closest to a fix, as a start for the user's own; None if no selection comes close.

    Its answer differs from the price of the fix: a fix makes ops as fast as their peers, this makes them ideal.
    """
    of_cause = (_of_cause(report, cause) for cause in report["causes"] if cause["kind"] == fix["cause"])
    closest = next((found for found in (_of_fix(report, fix), *of_cause) if found), ())
    return closest[0] if closest else None


def _of_causes(report: Mapping[str, Any]) -> Iterator[Suggestion]:
    for cause in report["causes"]:
        yield from _of_cause(report, cause)


def _of_cause(report: Mapping[str, Any], cause: Mapping[str, Any]) -> tuple[Suggestion, ...]:
    kinds = {row["kind"] for row in report["by_kind"]}
    where = cause["where"]
    if where["workers"]:
        return _workers(report, where)
    if cause["kind"] == "python-gc":  # its pauses are inside the forwards
        return (Suggestion("All forwards ideal", WhatifQuery("kind=forward-compute")),)
    if cause["kind"] == "late-data-loading" and "data-load" in kinds:
        return (Suggestion("Data loading ideal", WhatifQuery("kind=data-load")),)
    if where["links"]:
        return tuple(_link(link) for link in where["links"][:2])
    if where["pp_ranks"]:
        stages = ",".join(map(str, where["pp_ranks"]))
        return (Suggestion(f"Computes of stage {stages} ideal", WhatifQuery(f"stage={stages} and compute")),)
    if cause["kind"] == "sequence-length-imbalance":
        return (Suggestion("Forwards and backwards ideal", WhatifQuery("kind=forward-compute,backward-compute")),)
    if where["steps"] and len(where["steps"]) <= 40:
        return (Suggestion("Slow steps ideal", WhatifQuery(f"step={','.join(map(str, where['steps']))}")),)
    return ()


def _of_fixes(report: Mapping[str, Any]) -> Iterator[Suggestion]:
    for fix in report["fixes"]:
        yield from _of_fix(report, fix)


def _of_fix(report: Mapping[str, Any], fix: Mapping[str, Any]) -> tuple[Suggestion, ...]:
    collectives = [row["kind"] for row in report["by_kind"] if row["kind"] in DP_COLLECTIVES]
    if fix["kind"] == "replace-workers":
        return _workers(report, fix["where"])
    if fix["kind"] in ("compress-dp-communication", "overlap-dp-communication") and collectives:
        share = 1 / fix["details"]["ratio"] if fix["kind"] == "compress-dp-communication" else 0.0
        title = f"Data-parallel transfers take {f'{share:.2g} of the' if share else 'no'} time"
        return (Suggestion(title, WhatifQuery(f"kind={','.join(sorted(collectives))}", QueryAction.SCALE, share)),)
    return ()


def _workers(report: Mapping[str, Any], where: Mapping[str, Any]) -> tuple[Suggestion, ...]:
    """Suggest making the workers of a place ideal, unless they are too many to name.

    Not the same as a fix, which makes them as fast as their peers and has another price.
    """
    workers = [f"{worker['dp_rank']},{worker['pp_rank']}" for worker in where["workers"][: MOST_WORKERS + 1]]
    if not 0 < len(workers) <= MOST_WORKERS:
        return ()
    named = _name(report, where["workers"][0]) if len(workers) == 1 else f"{len(workers)} workers"
    place = f"Workers of {short(where['host'])}" if where["host"] else named
    return (Suggestion(f"{place} ideal", WhatifQuery(" or ".join(f"worker={worker}" for worker in workers))),)


def _name(report: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    """Name a worker by rank and host where known, capitalised."""
    place = {key: worker[key] for key in ("dp_rank", "pp_rank")}
    known = next((row for row in report["by_worker"] if place.items() <= row.items()), None)
    if known is None or known["rank"] is None:
        return Worker(**place).coordinates.capitalize().replace("Dp", "DP")
    return f"Rank {known['rank']}" + ("" if known["host"] is None else f" on {short(known['host'])}")


def _link(link: Mapping[str, int]) -> Suggestion:
    stages = f"{link['pp_rank']},{link['next_pp_rank']}"
    return Suggestion(
        f"Link of stage {link['pp_rank']} to {link['next_pp_rank']} on DP rank {link['dp_rank']} ideal",
        WhatifQuery(f"dp_rank={link['dp_rank']} and stage={stages} and kind=forward-pp-comm,backward-pp-comm"),
    )


def _general(report: Mapping[str, Any]) -> Iterator[Suggestion]:
    slowest = report["by_worker"][0] if report["by_worker"] else None
    if slowest is not None and slowest["slowdown"] > 1.01:
        worker = f"{slowest['dp_rank']},{slowest['pp_rank']}"
        yield Suggestion(f"{_name(report, slowest)} ideal", WhatifQuery(f"worker={worker}"))
    kinds = [row["kind"] for row in report["by_kind"]]
    if kinds:
        yield Suggestion(f"Ideal {kinds[0]}", WhatifQuery(f"kind={kinds[0]}"))
    yield Suggestion("Everything but communication", WhatifQuery("everything but communication"))
    yield Suggestion("All communication", WhatifQuery("communication"))
    yield Suggestion("Communication twice as fast", WhatifQuery("communication", QueryAction.SCALE, 0.5))
    yield Suggestion("Slowest 3 % of the ops", WhatifQuery("slowest=3%"))
    if len(report["by_pp_rank"]) > 1:
        last = report["by_pp_rank"][-1]["pp_rank"]
        yield Suggestion("Only the last stage slow", WhatifQuery(f"stage={last}", QueryAction.KEEP))


def _factor(value: object) -> float:
    try:
        factor = float(str(value).strip())
    except ValueError:
        factor = math.nan
    if not 0 <= factor <= LARGEST_FACTOR:
        raise SelectionError(f"factor {value!r:.40}; expected a number from 0 to {LARGEST_FACTOR:g}, such as 0.5")
    return factor


@dataclass(frozen=True, slots=True)
class Choice:
    """Values of the page's controls: each the text of one part of a selection, empty if unset."""

    kinds: tuple[str, ...] = ()
    stages: str = ""
    dp_ranks: str = ""
    workers: str = ""
    steps: str = ""
    microbatches: str = ""
    slowest: str = ""

    @classmethod
    def of(cls, text: str) -> Choice:
        """Return the controls that produce `text`; empty ones if controls cannot express it."""
        found: dict[str, str] = {}
        for part in re.split(r"\s+and\s+", text.strip()):
            if match := re.fullmatch(r"(kind|stage|dp_rank|step|microbatch|slowest)=(\S+)", part):
                name, value = match[1], match[2]
            elif workers := re.fullmatch(r"\(?((?:worker=\d+,\d+)(?:\s+or\s+worker=\d+,\d+)*)\)?", part):
                name, value = "worker", " ".join(re.findall(r"\d+,\d+", workers[1]))
            else:
                return cls()
            if name in found:
                return cls()
            found[name] = value
        return cls(
            kinds=tuple(found["kind"].split(",")) if "kind" in found else (),
            stages=found.get("stage", ""),
            dp_ranks=found.get("dp_rank", ""),
            workers=found.get("worker", ""),
            steps=found.get("step", ""),
            microbatches=found.get("microbatch", ""),
            slowest=found.get("slowest", "").removesuffix("%"),
        )
