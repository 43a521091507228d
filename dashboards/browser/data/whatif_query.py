"""What-if questions as people ask them in the browser, and their form in the address.

In: text from a field or an address. Out: `WhatifQuery`, one question; the questions that a report itself suggests, and
the one that a fix is. Selections and edits have the language of `whatif --fix` and `--keep`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tracekit.analysis.rl.scenario import Scenario
from tracekit.analysis.whatif.selection_text import parse_edit, parse_selection, read_factor
from tracekit.base.errors import SelectionError
from tracekit.base.text import short
from tracekit.report.conclusions import Fix
from tracekit.report.finding import Link, Place
from tracekit.report.report import Report
from tracekit.trace.model import Worker

#: A selection longer than this is no question of a person.
LONGEST_SELECTION = 1000
#: Questions kept side by side.
MOST_KEPT = 12
#: Parts of an address that are looked at for them.
MOST_PARTS = 100
#: Longer addresses are not made: servers and proxies refuse them, gunicorn from 8,190 characters on.
LONGEST_ADDRESS = 7500
#: Workers that a suggestion names one by one.
MOST_WORKERS = 8
#: Steps that one names.
MOST_STEPS = 40


class QueryAction(StrEnum):
    """What happens to the selected ops: `peers` and `scale` are `whatif --fix`, `keep` is `whatif --keep`."""

    PEERS = "peers"
    SCALE = "scale"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class WhatifQuery:
    """One question: the selection as text, what happens to it, and for `scale` by which factor.

    With `peers`, the text may be a whole edit, which scales some selections.
    """

    selection: str
    action: QueryAction = QueryAction.PEERS
    factor: float = 1.0

    @property
    def edit(self) -> str:
        """The question as `whatif --fix` takes it."""
        return f"{self.selection} * {self.factor:.6g}" if self.action is QueryAction.SCALE else self.selection

    def __str__(self) -> str:
        """The question in words."""
        match self.action:
            case QueryAction.PEERS if _is_alternative(self.selection):
                return self.selection
            case QueryAction.PEERS:
                terms = parse_edit(self.selection)
                plain = all(term.factor is None and term.selection is not None for term in terms)
                return f"{self.selection} as fast as peers" if plain else self.selection
            case QueryAction.KEEP:
                return f"only {self.selection} as recorded, all else ideal"
            case QueryAction.SCALE:
                return f"{self.selection} takes {self.factor:g} times as long"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A question that somebody may want to ask about this job, in a few words."""

    title: str
    query: WhatifQuery


def read_query(selection: str, action: str | None = None, factor: object = None) -> WhatifQuery:
    """A question from the texts of a form or an address. Raises SelectionError that says what is wrong with them."""
    text = " ".join(selection.split())
    if len(text) > LONGEST_SELECTION:
        raise SelectionError(f"the selection has {len(text):,} characters; expected at most {LONGEST_SELECTION:,}")
    try:
        chosen = QueryAction(action or QueryAction.PEERS)
    except ValueError:
        raise SelectionError(f"action {action!r:.40} is not known; expected {', '.join(QueryAction)}") from None
    if chosen is not QueryAction.PEERS:
        parse_selection(text)
    elif not _is_alternative(text):
        parse_edit(text)
    return WhatifQuery(text, chosen, read_factor(factor) if chosen is QueryAction.SCALE else 1.0)


def _is_alternative(text: str) -> bool:
    """Whether an edit is one of post-training, such as "staleness=1": it selects no ops."""
    try:
        Scenario.parse(text)
    except SelectionError:
        return False
    return True


def kept_text(questions: Iterable[WhatifQuery]) -> str:
    """Questions as one text of the address; no selection holds a semicolon."""
    return ";".join(
        f"{query.action}{f'*{query.factor:.6g}' if query.action is QueryAction.SCALE else ''}:{query.selection}"
        for query in questions
    )


def read_kept(text: str) -> tuple[tuple[WhatifQuery, ...], tuple[str, ...]]:
    """The inverse of `kept_text`, each question once, and in words what could not be read of it."""
    questions: list[WhatifQuery] = []
    problems: list[str] = []
    for part in filter(None, text.split(";", MOST_PARTS)[:MOST_PARTS]):
        match = re.fullmatch(r"([a-z]+)(?:\*([^:]*))?:(.*)", part, re.DOTALL)
        if not match:
            problems.append(f"{part!r:.60} is no kept scenario; expected for example `peers:worker=1,2`")
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


def suggestions(report: Report) -> tuple[Suggestion, ...]:
    """Questions that suit the job: the places of its causes first, then the ones that tell compute from network."""
    by_query: dict[WhatifQuery, Suggestion] = {}
    of_causes = (suggestion for cause in report.findings for suggestion in _at(report, cause.where))
    for suggestion in (*of_causes, *_general(report)):
        by_query.setdefault(suggestion.query, suggestion)
    return tuple(by_query.values())


def query_of(fix: Fix) -> WhatifQuery | None:
    """A fix as a question of the same price, to be changed and asked; None if it is no edit of costs."""
    edit = fix.edit
    if not edit or len(edit) > LONGEST_SELECTION:
        return None
    if _is_alternative(edit):
        return WhatifQuery(edit)
    terms = parse_edit(edit)
    if len(terms) == 1 and terms[0].factor is not None:
        return WhatifQuery(terms[0].text, QueryAction.SCALE, terms[0].factor)
    return WhatifQuery(edit)


def _at(report: Report, where: Place) -> Iterator[Suggestion]:
    """The place of a cause as fast as its peers, unless it is the whole job or too large to be named."""
    workers = [f"{worker.dp_rank},{worker.pp_rank}" for worker in where.workers[: MOST_WORKERS + 1]]
    if 0 < len(workers) <= MOST_WORKERS:
        named = worker_words(report, where.workers[0]) if len(workers) == 1 else f"{len(workers)} workers"
        place = f"Workers of {short(where.host)}" if where.host else named
        yield Suggestion(f"{place} like peers", WhatifQuery(" or ".join(f"worker={worker}" for worker in workers)))
    elif not workers and where.links:
        yield from map(_link, where.links[:2])
    elif not workers and where.pp_ranks:
        stages = ",".join(map(str, where.pp_ranks))
        chunks = ",".join(map(str, where.chunks))
        query = f"stage={stages} and compute" + (f" and chunk={chunks}" if chunks else "")
        of = f"model chunk {chunks} of " if chunks else ""
        yield Suggestion(f"Computes of {of}stage {stages} like peers", WhatifQuery(query))
    elif not workers and 0 < len(where.steps) <= MOST_STEPS:
        yield Suggestion("Slow steps like others", WhatifQuery(f"step={','.join(map(str, where.steps))}"))


def worker_words(report: Report, worker: Worker) -> str:
    """Name a worker by its rank and host, as far as known, with a capital."""
    row = next((row for row in report.by_worker or () if row.worker == worker), None)
    if row is None or row.rank is None:
        return worker.coordinates.capitalize().replace("Dp", "DP")
    return f"Rank {row.rank}" + ("" if row.host is None else f" on {short(row.host)}")


def _link(link: Link) -> Suggestion:
    stages = f"{link.pp_rank},{link.next_pp_rank}"
    return Suggestion(
        f"Link of stage {link.pp_rank} to {link.next_pp_rank} on DP rank {link.dp_rank} like peers",
        WhatifQuery(f"dp_rank={link.dp_rank} and stage={stages} and kind=forward-pp-comm,backward-pp-comm"),
    )


def _general(report: Report) -> Iterator[Suggestion]:
    if report.what_if:
        edits = [price.scenario for price in report.what_if if price.step_s is not None]
        edits += [fix.edit for fix in report.fixes if fix.edit and fix.withheld is None]
        yield from (Suggestion(edit, WhatifQuery(edit)) for edit in edits)
        return
    slowest = next(iter(report.by_worker or ()), None)
    if slowest is not None and slowest.slowdown > 1.01:
        worker = f"{slowest.dp_rank},{slowest.pp_rank}"
        yield Suggestion(f"{worker_words(report, slowest.worker)} like peers", WhatifQuery(f"worker={worker}"))
    kinds = [str(row.kind) for row in report.by_kind]
    if not report.by_worker:
        yield from (
            Suggestion(f"Every {kind} twice as fast", WhatifQuery(f"kind={kind}", QueryAction.SCALE, 0.5))
            for kind in kinds
            if kind != "window"
        )
        return
    if kinds:
        yield Suggestion(f"Every {kinds[0]} like the usual one", WhatifQuery(f"kind={kinds[0]}"))
    yield Suggestion("All computes like the usual ones", WhatifQuery("everything but communication"))
    yield Suggestion("All communication like the usual", WhatifQuery("communication"))
    yield Suggestion("Communication twice as fast", WhatifQuery("communication", QueryAction.SCALE, 0.5))
    yield Suggestion("Slowest 3% of the ops like peers", WhatifQuery("slowest=3%"))
    if len(stages := report.by_pp_rank or []) > 1:
        last = stages[-1].pp_rank
        yield Suggestion("Only the last stage slow", WhatifQuery(f"stage={last}", QueryAction.KEEP))


@dataclass(frozen=True, slots=True)
class ChosenOps:
    """What the controls of the page say: each the text of one part of a selection, empty where it says nothing."""

    kinds: tuple[str, ...] = ()
    stages: str = ""
    dp_ranks: str = ""
    workers: str = ""
    steps: str = ""
    microbatches: str = ""
    slowest: str = ""

    @classmethod
    def of(cls, text: str) -> ChosenOps:
        """The controls that write `text`; empty ones where it says more than they can."""
        parts: dict[str, str] = {}
        for part in " ".join(text.split()).split(" and ") if len(text) <= LONGEST_SELECTION else ("too long",):
            if match := re.fullmatch(r"(kind|stage|dp_rank|step|microbatch|slowest)=([^~\s]\S*)", part):
                name, value = match[1], match[2]
            elif workers := re.fullmatch(r"\(?((?:worker=\d+,\d+)(?:\s+or\s+worker=\d+,\d+)*)\)?", part):
                name, value = "worker", " ".join(re.findall(r"\d+,\d+", workers[1]))
            else:
                return cls()
            if name in parts:
                return cls()
            parts[name] = value
        return cls(
            kinds=tuple(parts["kind"].split(",")) if "kind" in parts else (),
            stages=parts.get("stage", ""),
            dp_ranks=parts.get("dp_rank", ""),
            workers=parts.get("worker", ""),
            steps=parts.get("step", ""),
            microbatches=parts.get("microbatch", ""),
            slowest=parts.get("slowest", "").removesuffix("%"),
        )
