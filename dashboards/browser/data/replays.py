"""What-if questions as people ask them in the browser, their form in the address, and their replays."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, structs

from tracekit.analysis.rl.rl_run import Scenario
from tracekit.analysis.whatif.selection_text import parse_edit, parse_selection, read_factor
from tracekit.base.errors import SelectionError, TracekitError
from tracekit.base.limits import time_limit
from tracekit.base.paths import command
from tracekit.base.text import short
from tracekit.dashboards.browser.data.queries import Results, Stored
from tracekit.report.conclusions import Fix
from tracekit.report.finding import Link, Place
from tracekit.report.hardware import GpuInReport
from tracekit.report.questions import Question
from tracekit.report.report import Report
from tracekit.trace.gpu_activity import IdleReason
from tracekit.trace.model import Worker

if TYPE_CHECKING:
    from tracekit.analysis.job.job import Job

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
#: Concurrent replays: each uses all cores, so more would only take memory.
AT_ONCE = 2
#: Answers kept in memory.
ANSWERS_KEPT = 1024
#: Questions that may wait for their turn.
MOST_WAITING = 64
#: A question that was not asked again for this long is dropped when its turn comes.
ABANDONED_S = 90.0
#: A question may take so long once its job is loaded.
LONGEST_S = 120.0
#: A larger job is not loaded into the server's memory.
MOST_OPS = 40_000_000


class QueryAction(StrEnum):
    """The change of the selected ops: `peers` and `scale` are `whatif --fix`, `keep` is `whatif --keep`."""

    PEERS = "peers"
    SCALE = "scale"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class WhatifQuery:
    """One question: the selection as text, what happens to it, and for `scale` by which factor.

    With `peers`, the text may be a whole edit, which scales some selections.

    Selections and edits have the language of `whatif --fix` and `--keep`.
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
    """A suggested question about this job, with a short title."""

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
    suggestions = (suggestion for cause in report.findings for suggestion in _place_suggestions(report, cause.where))
    for suggestion in (*suggestions, *_general_suggestions(report)):
        by_query.setdefault(suggestion.query, suggestion)
    return tuple(by_query.values())


def query_of(fix: Fix) -> WhatifQuery | None:
    """A fix as a question with the same price, which can be changed; None if it is not an edit of costs."""
    edit = fix.edit
    if not edit or len(edit) > LONGEST_SELECTION:
        return None
    if _is_alternative(edit):
        return WhatifQuery(edit)
    terms = parse_edit(edit)
    if len(terms) == 1 and terms[0].factor is not None:
        return WhatifQuery(terms[0].text, QueryAction.SCALE, terms[0].factor)
    return WhatifQuery(edit)


def _place_suggestions(report: Report, where: Place) -> Iterator[Suggestion]:
    """The place of a cause as fast as its peers, unless it is the whole job or too large to be named."""
    workers = [f"{worker.dp_rank},{worker.pp_rank}" for worker in where.workers[: MOST_WORKERS + 1]]
    if 0 < len(workers) <= MOST_WORKERS:
        workers_text = worker_words(report, where.workers[0]) if len(workers) == 1 else f"{len(workers)} workers"
        place = f"Workers of {short(where.host)}" if where.host else workers_text
        yield Suggestion(f"{place} like peers", WhatifQuery(" or ".join(f"worker={worker}" for worker in workers)))
    elif not workers and where.links:
        yield from map(_link, where.links[:2])
    elif not workers and where.pp_ranks:
        stages = ",".join(map(str, where.pp_ranks))
        chunks = ",".join(map(str, where.chunks))
        query = f"stage={stages} and compute" + (f" and chunk={chunks}" if chunks else "")
        of_chunks = f"model chunk {chunks} of " if chunks else ""
        yield Suggestion(f"Computes of {of_chunks}stage {stages} like peers", WhatifQuery(query))
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


def _general_suggestions(report: Report) -> Iterator[Suggestion]:
    if report.what_if is not UNSET:  # alternatives for a run, not changes of ops
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
    """The values of the controls of the page: each the text of one part of a selection, or empty."""

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


IDLE, RANKS, CLASSES = "Why a GPU is idle", "Rank", "Op class, twice as fast"
#: Most questions below each heading, and the smallest share of the recording worth a question.
MOST_ROWS, SMALLEST_SHARE = 5, 0.005
#: Larger recordings are replayed only on request.
_MOST_GPU_OPS = 500_000
#: Which ops of a rank make its GPU idle, by reason. Others are no ops: nothing changes them.
_KINDS = {
    IdleReason.LOADER: "input",
    IdleReason.GC: "gc",
    IdleReason.CHECKPOINT: "checkpoint",
    IdleReason.SYNCHRONISE: "synchronise",
    IdleReason.OPERATOR: "host",
    IdleReason.PYTHON: "host",
    IdleReason.LAUNCH_CALL: "host",
}


class GpuQuestion(Struct, frozen=True):
    """A question under a heading, about `subject`: an `IdleReason`, a rank or a class of ops.

    `takes_s`: how long it takes or, of a rank, how long others wait for it, seconds. `rank`: where a GPU is idle, if
    there are several.
    """

    heading: str
    subject: str
    takes_s: float
    query: WhatifQuery
    rank: int | None = None


def gpu_questions(report: Report) -> tuple[GpuQuestion, ...]:
    """The questions about a recording of GPUs, none about other jobs.

    Their answers are replays, so they have the prices of fixes.
    """
    gpus = report.gpu_of_ranks
    if not gpus or (report.job.gpu_ops or report.job.ops or 0) > _MOST_GPU_OPS:
        return ()
    least_s = SMALLEST_SHARE * gpus[0].recording_s
    if len(gpus) == 1:
        questions = [*_cause_questions(report, gpus[0])]
    else:
        questions = [*_idle_beyond_peers(report, gpus), *_rank_questions(report)]
    return tuple(question for question in (*questions, *_class_questions(report, gpus)) if question.takes_s >= least_s)


def _cause_questions(report: Report, gpu: GpuInReport) -> Iterator[GpuQuestion]:
    """One GPU has no peers: its idleness without the causes that were found, all of a kind together."""
    reasons = {cause.kind: cause.spent.reason for cause in report.findings if cause.spent}
    fixes: dict[str | None, list[Fix]] = {kind: [] for kind in reasons}
    for fix in report.fixes:
        if fix.cause in fixes and fix.withheld is None:
            fixes[fix.cause].append(fix)
    for kind, reason in reasons.items():
        taken_s = sum(finding.seconds for finding in gpu.findings if finding.reason == reason)
        edits = [query.selection for query in map(query_of, fixes[kind]) if query is not None]
        if edits:
            yield GpuQuestion(IDLE, reason, taken_s, WhatifQuery(" + ".join(edits)))


def _idle_beyond_peers(report: Report, gpus: Sequence[GpuInReport]) -> Iterator[GpuQuestion]:
    """The reasons for which a GPU is idle longer than its peers: the ops behind them at the pace of the peers."""
    idle = {gpu.rank: defaultdict[str, float](float) for gpu in gpus}
    reasons: dict[tuple[int, str], str] = {}
    for gpu in gpus:
        for row in sorted(gpu.idle_by_reason, key=lambda row: -row.seconds):
            if kind := _KINDS.get(IdleReason(row.reason)):
                idle[gpu.rank][kind] += row.seconds
                reasons.setdefault((gpu.rank, kind), row.reason)
    beyond = []
    for kind in {str(row.kind) for row in report.by_kind} & set(_KINDS.values()):
        usual_s = median(idle_s[kind] for idle_s in idle.values())
        beyond += [(idle_s[kind] - usual_s, kind, rank) for rank, idle_s in idle.items()]
    for more_s, kind, rank in sorted(beyond, reverse=True)[:MOST_ROWS]:
        if more_s >= SMALLEST_SHARE * gpus[0].recording_s:
            query = WhatifQuery(f"kind={kind} and rank={rank}")
            yield GpuQuestion(IDLE, reasons[rank, kind], idle[rank][kind], query, rank)


def _rank_questions(report: Report) -> Iterator[GpuQuestion]:
    """The ranks that others wait for."""
    for row in sorted(report.by_rank or (), key=lambda row: -(row.sole_delay_s or 0.0))[:MOST_ROWS]:
        yield GpuQuestion(RANKS, f"rank {row.rank}", row.sole_delay_s or 0.0, WhatifQuery(f"rank={row.rank}"))


def _class_questions(report: Report, gpus: Sequence[GpuInReport]) -> Iterator[GpuQuestion]:
    """The classes of kernels that take longest, the mean of all ranks."""
    kinds, taken_s = {str(row.kind) for row in report.by_kind}, dict[str, float]()
    for kernel in (kernel for gpu in gpus for kernel in gpu.kernels if kernel.of_class in kinds):
        taken_s[kernel.of_class] = taken_s.get(kernel.of_class, 0.0) + kernel.seconds / len(gpus)
    for name in sorted(taken_s, key=lambda name: -taken_s[name])[:MOST_ROWS]:
        yield GpuQuestion(CLASSES, name, taken_s[name], WhatifQuery(f"kind={name}", QueryAction.SCALE, 0.5))


class Phase(StrEnum):
    """The phases of answering a question, in order."""

    WAITING = "waiting for its turn"
    READING = "reading the trace"
    BUILDING = "building the graph"
    REPLAYING = "replaying"


@dataclass(frozen=True, slots=True)
class Pending:
    """No answer yet."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Rejected:
    """No answer, and why. `selection`: the selection is to blame, so the words belong to its field."""

    message: str
    selection: bool = False


class WhatifAnswer(Question, frozen=True):
    """The job after an edit. `slowdown`: only of the question of the paper, S of the ideal job with these ops as
    recorded; its seconds are without launch delays, beside T(original).
    """

    slowdown: float | None = None

    @property
    def recorded_s(self) -> float:
        """The step before the change, seconds."""
        return self.step_time_s + self.saved_s

    @property
    def clear(self) -> bool:
        """Whether the change is larger than its error."""
        return abs(self.saved_s) > self.error_s


Status = Pending | WhatifAnswer | Rejected
_Key = tuple[str, float, WhatifQuery]


@dataclass(slots=True)
class _Run:
    """One question under way; `status` changes as it proceeds."""

    stored: Stored
    query: WhatifQuery
    asked_at: float
    status: Status = field(default_factory=lambda: Pending(Phase.WAITING))
    done: threading.Event = field(default_factory=threading.Event)


class Replays:
    """Answers questions on jobs of a store, each once.

    Pages poll by asking again, so an abandoned page, a restarted server or a second process needs no clean-up.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="whatif")
        self._runs: OrderedDict[_Key, _Run] = OrderedDict()
        self._keeping = threading.Lock()
        self._loading = threading.Lock()

    def ask(self, stored: Stored, query: WhatifQuery, *, wait_s: float = 0.0) -> Status:
        """The state of the answer now, or after at most `wait_s` seconds; starts the replay of a new question."""
        job = None if stored.report is None else stored.report.job
        ops = 0 if job is None else job.ops or job.gpu_ops or 0
        if ops > MOST_OPS:
            return Rejected(
                f"The job has {ops:,} ops, more than the {MOST_OPS:,} that this server loads; ask with"
                f" `{self._by_hand(stored.name)}` where there is memory for it."
            )
        key = (stored.name, stored.imported_at, query)
        with self._keeping:
            run = self._runs.get(key) or self._start(key, stored, query)
            if run is None:
                return Rejected(f"{MOST_WAITING} questions are waiting already; ask again in a minute.")
            run.asked_at = time.monotonic()
            self._runs.move_to_end(key)
        run.done.wait(wait_s)
        status = run.status
        if isinstance(status, Rejected) and not status.selection:
            with self._keeping:  # what went wrong may be over the next time
                self._runs.pop(key, None)
        return status

    def _start(self, key: _Key, stored: Stored, query: WhatifQuery) -> _Run | None:
        """A new run in its queue; None where too many wait."""
        if sum(not run.done.is_set() for run in self._runs.values()) >= MOST_WAITING:
            return None
        run = _Run(stored, query, time.monotonic())
        self._runs[key] = run
        for old in [old for old, other in self._runs.items() if other.done.is_set()][:-ANSWERS_KEPT]:
            del self._runs[old]
        self._pool.submit(self._answer, key, run)
        return run

    def _answer(self, key: _Key, run: _Run) -> None:
        if time.monotonic() - run.asked_at > ABANDONED_S:
            with self._keeping:
                self._runs.pop(key, None)
            return
        try:
            run.status = self._replayed(run)
        except SelectionError as error:
            run.status = Rejected(str(error), selection=True)
        except TracekitError as error:
            run.status = Rejected(str(error))
        except MemoryError:
            run.status = Rejected(
                f"The job does not fit into this server's memory; ask with `{self._by_hand(run.stored.name)}`."
            )
        except Exception:
            logging.getLogger(__name__).exception("a replay failed")
            run.status = Rejected("An error of tracekit itself; the server's log has the details.")
        finally:
            run.done.set()

    def _by_hand(self, name: str) -> str:
        return command("whatif", "--store", self._results.path, "--job", name)

    def _replayed(self, run: _Run) -> WhatifAnswer:
        run.status = Pending(Phase.READING)
        with self._loading:  # one trace at a time: concurrent questions about a job read it once
            job = self._results.job_of(run.stored)
            run.status = Pending(Phase.BUILDING)
            job.build()
        run.status = Pending(Phase.REPLAYING)
        assert run.stored.report is not None, "only analysed jobs can be asked about"
        with time_limit(LONGEST_S):
            return answered(job, run.stored.report, run.query)


def answered(job: Job, report: Report, query: WhatifQuery) -> WhatifAnswer:
    """Replay the question. `report`: that of the job. Raises SelectionError for a selection without a single op."""
    keep = query.action is QueryAction.KEEP
    question = job.answer(query.edit, keep=keep)
    slowdown = question.step_time_s / report.step_time_s.ideal if keep else None
    return WhatifAnswer(**structs.asdict(question), slowdown=slowdown)
