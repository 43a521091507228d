"""The interface of a detector: one kind of finding, its signature, its words, its remedy, its fixes; which there are.

In: the evidence of a job. Out: `Candidate`s, each with its figures and the change that undoes it. A detector looks only
for a signature; the diagnosis asks the replay afterwards whether a candidate costs anything. Those of `DETECTORS`
are imported when a job is of their kind, those of plug-ins when any is asked for.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.attribution.patterns import TimePattern
from tracekit.analysis.detectors import DETECTORS, OF_EXCHANGES
from tracekit.analysis.evidence.subject import OF_RANKS, Cause, JobKind, Names, Plan, Subject, listed
from tracekit.analysis.numeric.arrays import Floats
from tracekit.base.plug_ins import PlugIn, plug_ins
from tracekit.base.text import code_name, short
from tracekit.report.finding import Figure, LossKind, Place, Spent
from tracekit.trace.model import OpKind, Worker

J = TypeVar("J", bound=Subject)
D = TypeVar("D", bound="Detector")


class FindingThresholds(Struct, frozen=True):
    """When a candidate is reported, and gives way to another one."""

    #: Share of the step that a finding costs, gone alone or with all others gone. Chosen: a cause that costs less saves
    #: less than the scatter of most runs; `eventsim` and `causes` accuse no healthy job with it.
    smallest_cost_share: float = 0.02
    #: Share of its price that another finding explains. Chosen: the larger part.
    most_of_price: float = 0.5


FINDINGS = FindingThresholds()


class Candidate(Struct, frozen=True, eq=False):
    """A signature that shows at one place of a job, without a price.

    `effect`: what it does, as a phrase with its size in it ("computes 80 % slower than its peers"). `change`: the job
    without it, None if the trace is at fault and not the job. `series`: its strength over the steps, 1 = none, [steps],
    if it has one; `time`: when it acts, by default as `series` shows. `title`, `next_check`, `suggested_fix`: override
    those of the detector if the job gives more detail. `bound`: the price is an upper bound. `every_step`: it shows in
    nearly all steps, though its kind acts by chance. `spent`: what the time of a recording is spent on. `after`: a
    change that its fix needs to be made before, which is no part of what it saves of a step without the profiler;
    `follows`: the kinds of finding that this is about.
    `most`: the job with as much gone as the fix can take away at most, where that is more than `change`. `excess`: how
    much longer the part of the rank takes than its peers', 0.4 = 40 %, which metrics of its machine can confirm;
    `slowest`: the worker that this is of, if `where` holds others, too. `one_off`: it stands apart in one or two steps,
    and nothing shows that it returns; `signature`, `refuted_by`: override those of the detector.
    """

    kind: str
    where: Place
    effect: str
    evidence: tuple[Figure, ...]
    confidence: float
    change: Any
    series: Floats | None = None
    time: TimePattern | None = None
    title: str | None = None
    next_check: str | Advice | None = None
    suggested_fix: str | Advice | None = None
    bound: bool = False
    every_step: bool = False
    spent: Spent | None = None
    after: Any = None
    follows: tuple[str, ...] = ()
    most: Any = None
    excess: float | None = None
    slowest: Worker | None = None
    one_off: bool = False
    signature: str | None = None
    refuted_by: str | None = None


class Repair(Struct, frozen=True):
    """The fix of a finding that can simply go away, priced by the replay without it.

    `kind`: the name of the fix. `title`: its goal. `reached`: the assumption behind its price, that the goal is
    reached; empty if that goes without saying. `assumes`: an assumption that every output shows. `excludes`: as for
    `Plan`.
    """

    kind: str
    title: str
    reached: str = ""
    assumes: str | None = None
    excludes: tuple[str, ...] = ()


class Treatment(Enum):
    """How findings are repaired that have to be repaired together, or in one of several ways."""

    REPLACE_MACHINES = "replace machines, or give them less work"
    BALANCE_DATA = "deal microbatches anew"
    MOVE_LAYERS = "split the layers anew"


class Detector(ABC):
    """One kind of finding.

    `kind`: its name in JSON, unique. `title`: its name for people. `signature`: how it shows. `refuted_by`: an
    observation that would refute it. `next_check`: where to look next. `suggested_fix`: what to do, with names to fill
    in (`remedy_for`). Both are an `Advice` if they differ in a job without GPUs.

    `loss`: the kind of loss that it causes; with `stragglers_where_few`, a few workers that it stops are stragglers.
    `part`: the part of a rank that it slows down, None if it concerns no rank; `part_of_machine`: the part whose
    metrics show it, if that is another. `label`: readers see this instead of the kind of loss where this finding leads.
    `lost_to`: the end of "12 ms of every step ...". `planned`: ops of planned work of the training loop that it
    consists of, which is no straggler, though S counts it. `by_chance`: it hits single ops, so no step is certain to
    have it. `explains_delays`: launch delays that go with it are accounted for. `beyond_experts`: it looks at what
    uneven loads of experts leave unexplained. `beyond_one_offs`: it looks at the job without what stands apart in one
    or two steps.

    `counted`: it rests on what was counted besides the times of ops, so a longer op does not explain it.

    `repair` or `treatment`: how to fix it; `fixes` for a fix of its own.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    signature: ClassVar[str] = ""
    refuted_by: ClassVar[str] = ""
    next_check: ClassVar[str | Advice] = ""
    suggested_fix: ClassVar[str | Advice] = ""
    loss: ClassVar[LossKind] = LossKind.STRAGGLER
    stragglers_where_few: ClassVar[bool] = False
    part: ClassVar[str | None] = None
    part_of_machine: ClassVar[str | None] = None
    label: ClassVar[str | None] = None
    lost_to: ClassVar[str | None] = None
    planned: ClassVar[OpKind | None] = None
    by_chance: ClassVar[bool] = False
    explains_delays: ClassVar[bool] = True
    beyond_experts: ClassVar[bool] = True
    beyond_one_offs: ClassVar[bool] = True
    counted: ClassVar[bool] = False
    repair: ClassVar[Repair | None] = None
    treatment: ClassVar[Treatment | None] = None

    def find(self, job: Any) -> Iterator[Candidate]:
        """Yield every place of a job where the signature shows; none where the job lacks what shows it.

        `job`: a `Subject`; for a detector of tracekit, of a kind that `DETECTORS` names.
        """
        return iter(())

    def review(self, job: Any, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates of all detectors as this one sees them: confirmed, refuted, or giving way to it."""
        return candidates

    def fixes(self, job: Any, finding: Cause) -> Iterator[Plan]:
        """Yield the fixes of one finding of this kind; by default, that it goes away as `repair` states.

        A `treatment` fixes workers together with those of other findings; single ranks are repaired.
        """
        if self.repair is not None and (self.treatment is None or finding.where.ranks):
            name = "" if finding.spent is None or not finding.spent.name else f": {code_name(finding.spent.name)}"
            yield Plan(
                kind=self.repair.kind,
                title=f"{self.repair.title}{name}",
                where=finding.where,
                change=finding.change,
                step_times=finding.without_s,
                bound=finding.bound,
                details={} if self.repair.assumes is None else {"assumes": self.repair.assumes},
                cause=finding,
                reached=self.repair.assumes or self.repair.reached,
                excludes=self.repair.excludes,
            )

    def loss_at(self, place: Place) -> LossKind:
        """Return the kind of loss that a finding at this place causes: single ranks are stragglers, whatever makes them
        late; few workers, where the detector says so.
        """
        few = self.stragglers_where_few if place.workers else place.ranks
        return LossKind.STRAGGLER if few else self.loss


def loss_of(cause: Candidate | Cause) -> LossKind:
    """Return the kind of loss that a finding causes: what stands apart in one or two steps is a stall."""
    return LossKind.STALLS if cause.one_off else detector_of(cause.kind).loss_at(cause.where)


def only_in(
    kind: type[J],
) -> Callable[[Callable[[D, J], Iterator[Candidate]]], Callable[[D, Subject], Iterator[Candidate]]]:
    """Return a decorator for a part of `find` that looks in one kind of job, and finds nothing in others."""

    def decorated(look: Callable[[D, J], Iterator[Candidate]]) -> Callable[[D, Subject], Iterator[Candidate]]:
        @wraps(look)
        def looked(detector: D, job: Subject) -> Iterator[Candidate]:
            return look(detector, job) if isinstance(job, kind) else iter(())

        return looked

    return decorated


class Advice(Struct, frozen=True):
    """What to do, or to check, in a job on GPUs, and in one without any."""

    gpu: str
    cpu: str


def advice_text(advice: str | Advice, *, on_cpus: bool = False) -> str:
    """Return advice as text. `on_cpus`: no GPU takes part in the job."""
    if isinstance(advice, str):
        return advice
    return advice.cpu if on_cpus else advice.gpu


#: Slow compared with its peers, for no visible reason.
SLOW_RANK = Advice(
    gpu="check {ranks} on {hosts} for throttled GPUs (nvidia-smi -q -d PERFORMANCE): if throttled, swap the node for a"
    " spare; if not, profile {it} and a peer (torch.profiler, py-spy)",
    cpu="check the cores of {ranks} on {hosts} for other processes and lowered clocks (top, /proc/pressure/cpu,"
    " turbostat); if there are none, profile {it} and a peer (py-spy)",
)
#: Slow in forwards only, or in backwards only: a slow machine would be slow in both.
SLOW_KIND = (
    "profile {ranks} and a peer (torch.profiler, py-spy record) and take out what runs only there: hooks, user"
    " code, other input"
)
#: What to look at there.
ONE_KIND_CHECK = (
    "a profile of that part on this rank and on a peer (py-spy record, torch.profiler): hooks and user code in it, its"
    " input; a machine that is slow is so in forwards and backwards"
)
#: More hosts than this are counted, not listed.
_MOST_HOSTS = 4


def remedy_for(advice: str | Advice, names: Names, where: Place, *, on_cpus: bool = False) -> str:
    """The advice with the names of a place filled in. `on_cpus`: no GPU takes part in the job.

    Names in braces: `ranks` ("rank 9"), `it` (the pronoun for them), `hosts` ("host-0001", or "its node" if none is
    known), `ends` (of a link), `place` (ranks, stage or link with their hosts).
    """
    text = advice_text(advice, on_cpus=on_cpus)
    if "{" not in text:
        return text
    place, ranks = names.place(where), replace(names, hosts={}, host_of_rank={}).place(where)
    words = "all ranks" if ranks is None else ranks.words.removeprefix(OF_RANKS)
    several = ranks is None or ranks.plural or ranks.words != words
    return text.format(
        place="all ranks" if place is None else place.words,
        ranks=words,
        it="them" if several else "it",
        hosts=_hosts(names, where),
        ends=_ends(names, where),
    )


def _hosts(names: Names, where: Place) -> str:
    """The hosts of a place, as far as all are known."""
    if where == Place(steps=where.steps):
        return "the hosts"
    workers = [*where.workers, *(end for link in where.links for end in link.ends)]
    workers += [
        worker for worker in names.ranks if worker.dp_rank in where.dp_ranks or worker.pp_rank in where.pp_ranks
    ]
    hosts = {names.hosts.get(worker, "") for worker in workers}
    hosts |= {names.host_of_rank.get(rank, "") for rank in where.ranks}
    if where.host is not None:
        hosts = {where.host}
    if "" in hosts or not hosts:
        return "its node" if len(workers) + len(where.ranks) == 1 else "their nodes"
    return listed(map(short, sorted(hosts))) if len(hosts) <= _MOST_HOSTS else f"the {len(hosts)} hosts"


def _ends(names: Names, where: Place) -> str:
    """The nodes that a link joins; its ranks if the nodes are unknown or the same."""
    ends = [end for link in where.links[:1] for end in link.ends]
    hosts = [names.hosts.get(end, "") for end in ends]
    if all(hosts) and len(set(hosts)) > 1:
        return listed(map(short, hosts))
    return listed(f"rank {names.ranks[end]}" if end in names.ranks else end.coordinates for end in ends)


class Unexplained(Detector):
    """The job straggles, and no detector found out why.

    Paper: attributes S to workers, stages and op kinds, whatever the cause.
    """

    kind = "unexplained"
    title = "Slow for a reason tracekit does not know"
    signature = "stragglers cost 9% or more, or more than noise does, and show none of the known signatures"
    next_check = "by_kind and the worker map; a timeline of the slowest step (`tracekit store export`)"


class Healthy(Detector):
    """The job does not straggle.

    Paper: S below 1.1.
    """

    kind = "healthy"
    title = "No straggler"
    signature = "stragglers cost less than 9%, hardly more than noise does, and show none of the known signatures"
    refuted_by = "stragglers cost 9% or more in another trace of the job"


class PlugInError(Exception):
    """A detector of a plug-in has raised; the message names it. The diagnosis is made again without it."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def detectors(kind: JobKind, job: Subject | None = None) -> tuple[Detector, ...]:
    """Return the detectors that look in jobs of a kind, those of plug-ins last; no module of another one is loaded.

    `job`: leave out those that look for what this job cannot have.
    """
    return (*own_detectors(kind, job), *(plug_in.value for plug_in in _plugged()[0].values()))


def own_detectors(kind: JobKind = JobKind.ANY, job: Subject | None = None) -> tuple[Detector, ...]:
    """Return the detectors of tracekit that look in jobs of a kind. `job`: as for `detectors`."""
    of_kind = [name for name, (_, where) in DETECTORS.items() if where & kind or kind is JobKind.ANY]
    return tuple(_own(name) for name in of_kind if job is None or name not in OF_EXCHANGES or job.exchanges)


def kinds() -> frozenset[str]:
    """Return all kinds of findings."""
    return frozenset(DETECTORS) | _plugged()[0].keys()


def left_out() -> tuple[str, ...]:
    """Return a sentence for each detector of a plug-in that cannot be used."""
    return _plugged()[1]


def detector_of(kind: str) -> Detector:
    """Return the detector of a kind of finding. Raises KeyError if there is none."""
    plugged: Detector = _own(kind) if kind in DETECTORS else _plugged()[0][kind].value
    return plugged


@cache
def _own(kind: str) -> Detector:
    module, name = DETECTORS[kind][0].split(".")
    detector: Detector = getattr(import_module(f"tracekit.analysis.detectors.{module}"), name)()
    return detector


def is_plug_in(kind: str) -> bool:
    """Whether findings of this kind come from a plug-in."""
    return kind not in DETECTORS


@contextmanager
def guarded(kind: str) -> Iterator[None]:
    """Raise PlugInError for whatever the body raises, if the detector of this kind is a plug-in."""
    if not is_plug_in(kind):
        yield
        return
    with _plugged()[0][kind].guarded(partial(PlugInError, kind)):
        yield


def _plugged() -> tuple[dict[str, PlugIn], tuple[str, ...]]:
    """The plug-ins by kind, and why others are left out."""
    loaded, problems = plug_ins("detectors", frozenset(DETECTORS), _fits)
    misnamed = tuple(
        f"{plug_in.source} is left out: its kind is {plug_in.value.kind!r:.40};"
        " give both the same name, one that tracekit itself does not use"
        for name, plug_in in loaded.items()
        if plug_in.value.kind != name
    )
    return {name: plug_in for name, plug_in in loaded.items() if plug_in.value.kind == name}, problems + misnamed


def _fits(value: object) -> bool:
    """Whether an object is a detector whose attributes have the types that `Detector` states."""
    return isinstance(value, Detector) and all(
        isinstance(getattr(value, name, None), get_args(stated)[0]) for name, stated in get_type_hints(Detector).items()
    )


def parts() -> tuple[str, ...]:
    """Return all parts of a rank that can be slow, each once."""
    return tuple(dict.fromkeys(detector.part for detector in detectors(JobKind.ANY) if detector.part is not None))
