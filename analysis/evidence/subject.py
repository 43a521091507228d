"""A job under diagnosis: what the diagnosis and every detector can ask, whatever kind of job it is.

In: nothing. Out: `Subject`, which `PipelineSubject`, `GraphSubject` and `RlSubject` implement; `Cause`s found in one,
the `Plan` of a fix before it is priced; `Names` of its places. Everything else that detectors read is `evidence`: a
function of one kind of job, computed once per job, and None for others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from enum import Flag, auto
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, overload

from msgspec import Struct, field

from tracekit.analysis.attribution.attribution import VERDICT, Parts
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.numeric.statistics import NOTHING, Estimate, saving_error_s
from tracekit.analysis.whatif.interventions import Intervention
from tracekit.base.text import hidden, runs, seconds, short
from tracekit.report.conclusions import Finding
from tracekit.report.finding import Link, Place
from tracekit.report.hardware import MetricTest
from tracekit.trace.facts import Fact, Lack
from tracekit.trace.model import Worker

if TYPE_CHECKING:
    from tracekit.analysis.evidence.graph_subject import GraphSubject

#: Lists with more names than this give their number instead.
_MOST_NAMED = 4
#: What the price of a repair assumes.
SPEED_OF_PEERS = "the speed of peers afterwards"
#: Fixes of which a combination has one: replace a machine, or give it less work.
MACHINE = ("machine",)
#: ... and: move layers in one way.
LAYERS = ("layers",)
#: Begins the name of a worker whose ranks cannot be told apart.
OF_RANKS = "the worker of "


class JobKind(Flag):
    """A pipeline; any graph of ops; a recording of GPUs, which is such a graph, too; or a run of post-training."""

    NONE = 0
    PIPELINE = auto()
    GRAPH = auto()
    RECORDING = auto()
    POST_TRAINING = auto()
    ANY = PIPELINE | GRAPH | RECORDING | POST_TRAINING


class Subject(Struct, frozen=True, eq=False, dict=True):
    """A job under diagnosis. Seconds are of the mean step; of a recording of GPUs, which is one step, of all of it."""

    #: What kind of job it is.
    kind: ClassVar[JobKind]
    #: What the times are of: "step" or "recording".
    whole: ClassVar[str] = "step"

    @property
    @abstractmethod
    def gpus(self) -> int | None:
        """The number of GPUs of the job, None if it is not known."""

    @property
    @abstractmethod
    def steps(self) -> Int32s:
        """The step numbers."""

    @property
    def steps_in_whole(self) -> int:
        """The number of training steps in what the times are of."""
        return 1

    @property
    def daily(self) -> bool:
        """Whether it shows enough of the job to say what a day of it costs: more than one step."""
        return self.whole != "step" or len(self.steps) > 1

    def gpu_hours_per_day(self, share: float) -> float | None:
        """GPU-hours a day that a share of the job's time is; None if no day of it follows (`daily`), or the number of
        GPUs is not known.
        """
        return None if self.gpus is None or not self.daily else share * self.gpus * 24

    @property
    def everywhere(self) -> str:
        """The whole job as a place, in words."""
        return "its only rank" if self.gpus == 1 else "all ranks"

    @property
    def where_else(self) -> dict[str, str]:
        """Where kinds of cause are that name no part of the job but are not everywhere, in words."""
        return {}

    @property
    def all_workers_traced(self) -> bool:
        """Whether every worker of the job has ops in the trace."""
        return True

    @property
    def alone(self) -> bool:
        """Whether a single rank was recorded, without peers to compare it with."""
        return False

    @property
    def names(self) -> Names:
        """The names of places in the job."""
        return Names()

    @property
    @abstractmethod
    def lacks(self) -> tuple[Lack, ...]:
        """What the source cannot show."""

    def shows(self, fact: Fact) -> bool:
        """Return whether the source shows a fact."""
        return all(lack.fact is not fact for lack in self.lacks)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Free metadata of the trace."""
        return {}

    @property
    def gpu_model(self) -> str | None:
        """The name of its GPUs, as far as it is recorded."""
        name = self.metadata.get("gpu")
        return str(name) if name else None

    @property
    @abstractmethod
    def slowdown(self) -> float:
        """S = T(original) / T(ideal)."""

    @property
    def straggling(self) -> bool:
        """Whether S >= 1.1."""
        return self.slowdown >= VERDICT.straggling

    @property
    @abstractmethod
    def noise(self) -> Parts:
        """What the noise of the run makes of S."""

    @abstractmethod
    def step_times(self, changes: Sequence[Intervention]) -> Floats:
        """Return the duration of each step after these changes, seconds, [steps]."""

    @cached_property
    def unchanged(self) -> Floats:
        """Step times of the job without changes, with launch delays, seconds, [steps]."""
        return self.step_times(())

    @property
    def unchanged_s(self) -> float:
        """Their mean, seconds."""
        return float(self.unchanged.mean())

    @property
    @abstractmethod
    def recorded_s(self) -> float:
        """The mean recorded step; of a recording, from its first event to its last; seconds."""

    @property
    def measured_s(self) -> float:
        """The mean step as measured, without stalls between steps, seconds."""
        return self.recorded_s

    @property
    @abstractmethod
    def replay_error(self) -> float:
        """How far the replay with launch delays misses the recording, as a share of it."""

    @property
    def exchanges(self) -> GraphSubject | None:
        """The graph that shows loads of experts: of a pipeline, its all-to-alls and the work between them; of any other
        graph, itself; None without all-to-alls, unless loads of experts were logged for a graph.
        """
        return None

    def of_exchanges(self, change: Intervention) -> Intervention | None:
        """Return what a change of `exchanges` is in the job itself; None if it is nothing."""
        return change

    @property
    def beyond_experts(self) -> Subject:
        """The job without what loads of experts explain, or may explain."""
        return self

    @property
    def beyond_one_offs(self) -> Subject:
        """The job without what stands apart in one or two of its steps, and so shows nothing that returns."""
        return self

    @property
    def unprofiled_step(self) -> Estimate | None:
        """The step without the profiler, seconds; None if no profiler recorded the job, or if that is not known."""
        return None

    @property
    def unprofiled_step_words(self) -> str:
        """That step in words, which say whether it is an estimate."""
        return "" if self.unprofiled_step is None else f"about {seconds(self.unprofiled_step.value)}"

    def saves_step(
        self, changes: Sequence[Intervention], *, bound: bool = False, after: Intervention | None = None
    ) -> Estimate | None:
        """Return what these changes save of the step without the profiler, None if it is not known. `bound`: at most so
        much. `after`: once that is done.
        """
        del changes, bound, after
        return None

    def lost_by_step(self, change: Intervention, without: Floats) -> tuple[Sequence[int], Floats]:
        """Return training steps, and what each loses to what a change takes away, seconds, [steps].

        `without`: the step times after the change, seconds.
        """
        del change
        return self.steps.tolist(), self.unchanged - without

    def saving_error_s(self, saving: Floats, changes: Sequence[Any]) -> float:
        """Return how far the mean saving of these changes, of [steps], can be off."""
        del changes
        return saving_error_s(saving, self.replay_error * self.measured_s)

    def explained(self, change: Intervention, other: Intervention, after: Sequence[Intervention] = ()) -> float:
        """Return the share of what `change` saves that is gone after `other`, 0 to 1; 0 if it saves nothing. Both come
        after the changes in `after`.
        """
        saved_s = float((self.step_times(after) - self.step_times((*after, change))).mean())
        left_s = float((self.step_times((*after, other)) - self.step_times((*after, other, change))).mean())
        return 1 - min(max(left_s / saved_s, 0.0), 1.0) if saved_s > NOTHING else 0.0

    @abstractmethod
    def has(self, where: Place) -> bool:
        """Return whether the job has a place."""

    def places(self, where: Place) -> Iterator[tuple[int | None, Worker | None]]:
        """Yield the ranks of a place, as far as known, and their workers; none for the whole job."""
        yield from ((rank, None) for rank in where.ranks)


class Cause(Finding, frozen=True, kw_only=True, eq=False):
    """One cause of a job's slowness, with the replay that prices it.

    `change`: the job without the cause, None if the trace is at fault and not the job; `without_s`: its step times,
    seconds, [steps]. `every_step`: it shows in nearly all steps, though its kind acts by chance. `follows`: kinds of
    finding that have to be seen to first. `excess`, `slowest`, `one_off`: as for a candidate. `tests`: what metrics say
    of its machines; `hardware`: whether they, or else the recording, show these at fault.
    """

    change: Any = None
    without_s: Floats | None = None
    one_off: bool = False
    every_step: bool = False
    follows: tuple[str, ...] = ()
    excess: float | None = None
    slowest: Worker | None = None
    tests: tuple[MetricTest, ...] = ()
    hardware: bool = False

    @property
    def finding(self) -> Finding:
        """What a report has of it."""
        return Finding(*(getattr(self, name) for name in Finding.__struct_fields__))

    @property
    def worth_s(self) -> float:
        """The key to order causes by: what a step saves, without the profiler if one recorded the job."""
        return self.saved_s if self.saves_step_s is None else self.saves_step_s.value

    @property
    def returning_share(self) -> float:
        """The share of its cost that recurs in other steps, from which rates follow; 1 if all of it does."""
        if self.once is None:
            return 1.0
        lost_s, others_s = sum(self.once.lost_s), self.once.others_s * self.once.of_steps
        return others_s / (lost_s + others_s)

    @property
    def hidden(self) -> bool:
        """True if the cause costs little until other causes are gone."""
        return hidden(self.saved_s, self.alone_s)

    @property
    def cost_s(self) -> float:
        """Mean step seconds saved without it: in the job as it is or, if it hides behind others, once they are gone."""
        return self.alone_s if self.hidden else self.saved_s


class Plan(Struct, frozen=True, eq=False):
    """One proposed fix. `step_times`: its step times if known, seconds, [steps]; None: replay `change` to get them.

    `extra_s`: seconds it adds to each step. `bound`: the replay gives an upper bound of the saving. `cause`: the cause
    that it addresses, None for a fix that any job can try. `details["assumes"]`: an assumption of the price.
    `reached`: if the title gives a goal and not the way to it, the assumption that it is reached. `around`: it works
    around its cause, which stays. `excludes`: of all fixes with one of these names, a combination has one. `edit`:
    `change` as text, see `Fix.edit`; None: as `fix=KIND`.
    """

    kind: str
    title: str
    where: Place
    change: Any
    step_times: Floats | None = None
    extra_s: float = 0.0
    bound: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    cause: Cause | None = None
    reached: str | None = None
    around: bool = False
    excludes: tuple[str, ...] = ()
    edit: str | None = None


class Phrase(Struct, frozen=True):
    """A place in words. `plural`: whether its verb is in the plural."""

    words: str
    plural: bool

    def verb(self, singular: str, plural: str) -> str:
        """The form of a verb that agrees with the place."""
        return plural if self.plural else singular


class Names(Struct, frozen=True):
    """`ranks`: the recorded rank of each worker; `hosts`: its host, as far as known; `stages`: pipeline stages.

    `host_of_rank`: the host of each rank, as far as known. `alike`: the number of ranks of a worker, from the recorded
    one on, that the recording cannot distinguish.
    """

    ranks: Mapping[Worker, int] = {}
    hosts: Mapping[Worker, str] = {}
    stages: int = 1
    host_of_rank: Mapping[int, str] = {}
    alike: int = 1

    def place(self, where: Place) -> Phrase | None:
        """The name of `where`; None for the whole job."""
        if where.workers:
            return self._workers(where.workers)
        if where.ranks:
            return _on_hosts(_several("rank", where.ranks), {self.host_of_rank.get(rank, "") for rank in where.ranks})
        if where.links:
            return self._links(where.links)
        if where.pp_ranks:
            stages = _several("stage", where.pp_ranks)
            return Phrase(f"model chunk {listed(where.chunks)} of {stages.words}", False) if where.chunks else stages
        if where.dp_ranks and self.stages == 1:
            return self._workers([Worker(dp_rank, 0) for dp_rank in where.dp_ranks])
        return _several("DP rank", where.dp_ranks) if where.dp_ranks else None

    def _workers(self, workers: Sequence[Worker]) -> Phrase:
        if any(worker not in self.ranks for worker in workers):  # not recorded
            return _several("worker", [worker.coordinates for worker in workers])
        hosts = {self.hosts.get(worker, "") for worker in workers}
        recorded = [self.ranks[worker] for worker in workers]
        if self.alike == 1 or any(rank % self.alike for rank in recorded):
            return _on_hosts(_several("rank", recorded), hosts)
        ranks = _several("rank", [rank + more for rank in recorded for more in range(self.alike)])
        if len(workers) == 1:  # one worker computes, costs and waits in the singular
            ranks = Phrase(OF_RANKS + ranks.words, False)
        return _on_hosts(ranks, hosts)

    def _links(self, links: Sequence[Link]) -> Phrase:
        first = links[0]
        ends = first.ends
        hosts = [f" on {short(host)}" if (host := self.hosts.get(end)) else "" for end in ends]
        names = [f"rank {self.ranks[end]}" if end in self.ranks else end.coordinates for end in ends]
        within = hosts[0] == hosts[1]
        link = f"link between {names[0]}{'' if within else hosts[0]} and {names[1]}{hosts[1]}"
        return (
            Phrase(f"the {link}", False) if len(links) == 1 else Phrase(f"{len(links)} links, first the {link}", True)
        )


def _on_hosts(ranks: Phrase, hosts: Set[str]) -> Phrase:
    """Ranks and the hosts they are on, if all hosts are known and there are few."""
    if "" in hosts or len(hosts) > _MOST_NAMED:
        return ranks
    return Phrase(f"{ranks.words} on {listed(map(short, sorted(hosts)))}", ranks.plural)


def listed(items: Iterable[object]) -> str:
    """Items as a list in a sentence."""
    shown = [str(item) for item in items]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _several(noun: str, numbers: Sequence[object]) -> Phrase:
    """One or more things of a kind; neighbours as ranges."""
    if len(numbers) == 1:
        return Phrase(f"{noun} {numbers[0]}", False)
    named = [
        f"{first}" if first == last else f"{first}-{last}"
        for first, last in runs(number for number in numbers if isinstance(number, int))
    ] or [str(number) for number in numbers]
    if len(named) > _MOST_NAMED:
        return Phrase(f"{len(numbers)} {noun}s ({', '.join(named[:_MOST_NAMED])}, ...)", True)
    return Phrase(f"{noun}s {listed(named)}", True)


J = TypeVar("J", bound=Subject)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
J_contra = TypeVar("J_contra", bound=Subject, contravariant=True)


class Evidence(Protocol[J_contra, T_co]):
    """Evidence on a job."""

    @overload
    def __call__(self, job: J_contra, /) -> T_co: ...
    @overload
    def __call__(self, job: Subject, /) -> T_co | None: ...


@overload
def evidence(kind: type[J]) -> Callable[[Callable[[J], T_co]], Evidence[J, T_co]]: ...
@overload
def evidence(kind: type[J], *, otherwise: T) -> Callable[[Callable[[J], T]], Callable[[Subject], T]]: ...


def evidence(kind: type[J], *, otherwise: Any = None) -> Any:
    """Return a decorator for a function that needs a job of this kind.

    The result answers for any job, with `otherwise` where the job is of another kind. It is computed once per job, and
    kept with it.
    """

    def decorated(gather: Callable[[J], Any]) -> Callable[[Subject], Any]:
        @wraps(gather)
        def gathered(job: Subject) -> Any:
            if not isinstance(job, kind):
                return otherwise
            memo = vars(job).setdefault("_evidence", {})
            if gathered not in memo:
                memo[gathered] = gather(job)
            return memo[gathered]

        return gathered

    return decorated
