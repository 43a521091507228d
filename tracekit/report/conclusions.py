"""What is concluded: trust, verdict, findings, fixes, the answer in words, nodes to drain, the verdict of a run.

In: what the analysis found. Out: plain data, with every sentence that a reader sees. While the diagnosis is made, its
causes and fixes are these, too, and carry what prices them beside (`Cause`, `PricedFix`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import UNSET, Struct

from tracekit.analysis.attribution.patterns import SpacePattern, TimePattern
from tracekit.analysis.numeric.statistics import Estimate
from tracekit.base.quantities import Amount, Count, Finite, Moment, Number, Ordinal, Proportion, Seconds
from tracekit.base.text import runs, short
from tracekit.report.finding import LossKind, Place, SeenOnce, Spent, Unit
from tracekit.report.tables import Maybe
from tracekit.trace.model import Worker

#: Parts of a rank that a fault of its machine can slow down; others are software or input.
MACHINE_PARTS = frozenset(("compute", "process", "network"))
#: More nodes than this are counted, not listed.
_MOST_LISTED = 4
#: A valid node name: a host name without characters that mean something else to a shell or to Slurm.
_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
#: A name that ends in a number, has more than that number, and whose number fits into Slurm's 64 bits.
_NUMBERED = re.compile(r"(.*\D)(\d{1,18})")
#: A cause that costs less than this share of the step is not a headline by itself.
SMALLEST_ALARMING_SHARE = 0.05
#: The cause of what is left of a straggler's loss once its causes are named.
UNEXPLAINED = "unexplained"


class Trust(Struct, frozen=True):
    """Whether to believe the report."""

    replay_error: Amount | None
    discrepancy: Number
    unexplained: Number
    trustworthy: bool
    reasons: list[str]
    clamped_transfers: Maybe[Count] = UNSET
    clamped_delays: Maybe[Count] = UNSET
    notes: Maybe[list[str]] = UNSET
    start_gap_p99_s: Maybe[dict[str, Seconds | None]] = UNSET
    edges: Maybe[Count] = UNSET
    inferred_edges: Maybe[Count] = UNSET
    violations: Maybe[Count] = UNSET
    host_ahead_of_gpu_s: Maybe[dict[Ordinal, Finite]] = UNSET


class Loss(Struct, frozen=True):
    """What one kind of loss costs. `causes`: places in the report's causes, in the order in which to address them;
    `explained_s`: what goes when they go.
    """

    kind: LossKind
    lost_s: Finite
    causes: list[Count]
    explained_s: Finite


class LossParts(Struct, frozen=True):
    """What the loss that S measures consists of."""

    lost_s: Finite
    explained_s: Finite
    noise_s: Finite
    unexplained_s: Seconds
    error_s: Seconds


class CauseOfCulprit(Struct, frozen=True):
    """One cause on the rank that the others wait for."""

    cause: str
    saved_s: Finite
    evidence: str
    effect: str
    action: str


class RankToBlame(Struct, frozen=True):
    """The rank that the others wait for."""

    rank: Ordinal
    host: str | None
    saved_s: Finite
    sole_delay_s: Seconds | None
    waited_s: Seconds | None
    causes: list[CauseOfCulprit]


class Verdict(Struct, frozen=True):
    """The kind of loss that costs most, and the total loss.

    `headline_s`: seconds of the mean step that `kind` costs; `lost_s`: that all losses cost together; `share`: the
    total loss over the recorded step. `label`: what readers see of the kind, which tells slow ranks from ranks with
    more work. `sentence`: the verdict in words, without its kind. `confidence`: that of the leading cause, 0 to 1, None
    if no cause is named. `parts`: what S consists of, with all causes. `of_mean_ops`: the loss is what S counts,
    compared with mean ops. `first_fix`: the place of the fix to begin with; `who`, `cost`, `action`: as of the answer.
    `formula`: what `lost_s` is the value of.
    """

    kind: LossKind
    label: str
    headline_s: Seconds
    lost_s: Seconds
    share: Proportion
    lost_gpu_hours: Amount | None
    lost_gpu_hours_per_day: Amount | None
    sentence: str
    confidence: Proportion | None
    losses: list[Loss]
    parts: LossParts
    of_mean_ops: bool
    first_fix: Count | None
    who: str | None
    cost: str | None
    action: str | None
    formula: Maybe[str] = UNSET
    exposed_communication_s: Maybe[Seconds] = UNSET
    culprit: Maybe[RankToBlame | None] = UNSET


class Patterns(Struct, frozen=True):
    """How the slowdown runs over steps and workers; null for jobs that are no pipelines."""

    time: TimePattern | None
    space: SpacePattern | None


class EvidenceFigure(Struct, frozen=True):
    """A figure that supports a cause."""

    name: str
    value: Number
    needed: Finite
    unit: Unit
    words: str


class Finding(Struct, frozen=True):
    """One cause of a job's slowness.

    `effect`: what it does, as a phrase with its size in it; `evidence`: the figures behind it. `time`: how it develops
    over the steps, None if that is meaningless; `since_step`: first step of a lasting change or of a run of slow steps,
    None: from the beginning; `when`: when it acts, in words. `saved_s`: mean step seconds saved if only this cause
    goes; `alone_s`: mean step seconds that it costs if all other named causes are gone. The two differ if causes hide
    each other. `bound`: `saved_s` is an upper bound. `saved_when_acting_s`: as `saved_s`, over the steps in which it
    acts, None if that is all of them. `confidence`: 0 to 1. `spent`: what the time of a recording is spent on.
    `saves_step_s`: what its end saves of a step as it runs without the profiler, seconds; None if that is not known, or
    if no profiler recorded the job. `once`: the steps in which it was seen, None if it returns. `costs`: what it costs,
    in words. `priced`: whether a replay tells what it costs; else the trace is at fault, or nothing is wrong.
    """

    kind: str
    title: str
    where: Place
    where_text: str
    since_step: Ordinal | None
    when: str
    time: TimePattern | None
    signature: str
    effect: str
    evidence: tuple[EvidenceFigure, ...]
    confidence: Proportion
    saved_s: Finite
    alone_s: Finite
    bound: bool
    saved_when_acting_s: Number
    refuted_by: str
    next_check: str
    suggested_fix: str
    spent: Spent | None
    saves_step_s: Estimate | None
    once: SeenOnce | None
    costs: str
    priced: bool


class Fix(Struct, frozen=True):
    """One fix and its price.

    `new_step_s`: mean recorded step with the fix, seconds; `saved_s`: mean seconds saved per step, +- `error_s` (replay
    error, and half the 95 % interval of the saving over the steps). `bound`: True if `saved_s` is an upper bound.
    `withheld`: why no saving is reported, None if one is; the figures are then None. `assumes`: what the price assumes
    but the trace does not show, None if nothing. `cause`: the cause that the fix addresses, with `confidence` in that
    cause, 0 to 1; None for a fix that any job can try. `edit`: the fix as text that `whatif --fix` gives the same
    price, to be changed and asked again; None if it is no change of costs. `details`: the plan as plain data.
    `saves_step_s`: as of `Finding`; `unprofiled_step_s`: the step without the profiler, as it is.
    `saved_gpu_hours_per_day` is of that.
    """

    kind: str
    title: str
    where: Place
    where_text: str
    new_step_s: Number
    saved_s: Number
    saved_gpu_hours_per_day: Number
    error_s: Seconds
    bound: bool
    withheld: str | None
    assumes: str | None
    cause: str | None
    confidence: Proportion | None
    edit: str | None
    details: dict[str, Any]
    saves_step_s: Estimate | None
    unprofiled_step_s: Seconds | None

    @property
    def worth_s(self) -> float:
        """The key that orders fixes: the saving without the profiler, if the job was recorded with one."""
        return (self.saved_s or 0.0) if self.saves_step_s is None else self.saves_step_s.value


class CauseInWords(Struct, frozen=True):
    """One cause in sentences, with everything that an alert about it needs.

    `part`: what part of a rank is slow, None if the cause concerns the whole job. `what`: place, effect and cost.
    `who`, `why`, `check` and `fix`: as in `Answer`. `ranks`, `hosts`, `gpu_uuids`: where it is, as far as known.
    `cost_s`: seconds of the mean step, `share`: of the recorded step. `saved_gpu_hours_per_day`: saved by `fix`; None
    if no saving is reported. `metrics`: what metrics of its machines say, left out if nobody asked them. `code`: the
    line of code at which its rank differs from healthy peers, left out if nobody asked or none explains it.
    """

    kind: str
    part: str | None
    what: str
    who: str
    why: str
    check: str
    fix: str | None
    ranks: tuple[Ordinal, ...]
    hosts: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    cost_s: Seconds
    share: Amount
    confidence: Proportion
    first_step: Ordinal | None
    saved_gpu_hours_per_day: Number
    metrics: Maybe[str] = UNSET
    code: Maybe[str] = UNSET


class Culprit(Struct, frozen=True):
    """One rank that a cause is on. `part`: what part of it is slow. `cost_s`: of the whole cause, mean seconds per
    step.

    `rank`, `host`, `gpu_uuid`: None if unknown; `dp_rank`, `pp_rank`: None if the job is no pipeline. `first_step`:
    since when, None if from the beginning. `hardware`: whether the recording shows that its machine is at fault.
    """

    rank: Ordinal | None
    dp_rank: Ordinal | None
    pp_rank: Ordinal | None
    host: str | None
    gpu_uuid: str | None
    part: str
    cost_s: Seconds
    confidence: Proportion
    first_step: Ordinal | None
    hardware: bool

    @property
    def worker(self) -> Worker | None:
        """The worker that the rank belongs to, None if the job is no pipeline."""
        return None if self.dp_rank is None or self.pp_rank is None else Worker(self.dp_rank, self.pp_rank)


class Answer(Struct, frozen=True):
    """Sentences without a full stop, None if there is nothing to say.

    `headline`: as the verdict's, without its kind. `fix`: what to do first about the leading cause, and what that
    saves; `action` and `saves`: the two parts of it. `check`: where else to look. `others`: the other causes that cost
    time, one sentence each, with the cost. `stalls`: isolated slow steps, by how much and why, longest first. `causes`:
    where each of the diagnosis's causes is and what it does, in the same order; `places`: only where. `accounts`: for
    each cause that costs time, the leading one first, everything to say about it.
    """

    headline: str
    cost: str | None
    who: str | None
    why: str | None
    check: str | None
    fix: str | None
    action: str | None
    saves: str | None
    others: tuple[str, ...]
    stalls: tuple[str, ...]
    causes: tuple[str, ...]
    places: tuple[str, ...]
    trust: str
    culprits: tuple[Culprit, ...]
    accounts: tuple[CauseInWords, ...]


class Nodes(NamedTuple):
    """Nodes of culprits, costliest first, with names that are safe for a script: those to `drain`, and the others."""

    drain: tuple[str, ...]
    suspects: tuple[str, ...]

    @property
    def sentence(self) -> str | None:
        """What to do with them; None if there are none."""
        if self.drain:
            return f"Drain {_listed(self.drain)}: the recording shows hardware at fault there."
        if self.suspects:
            return f"Do not drain {_listed(self.suspects)} yet: the recording shows no hardware at fault there."
        return None


class Accused(Struct, frozen=True):
    """The culprits of a job, and whether what names them can be trusted."""

    job: str
    trustworthy: bool
    trust: str
    culprits: Sequence[Culprit]


def nodes_of(culprits: Iterable[Culprit], *, trusted: bool) -> Nodes:
    """The nodes of `culprits`. `trusted`: whether the report can be.

    The one rule for what may be drained. A slow rank is no reason to drain its node: user code, input or a neighbour on
    its cores slow it down just as well. It takes hardware evidence, such as a throttled GPU, in a report that can be
    trusted. Other nodes are suspects, which a script gets only where it asks for them.
    """
    drain: dict[str, None] = {}
    nodes: dict[str, None] = {}
    for culprit in culprits:
        host = culprit.host
        if host is not None and is_node_name(host):
            nodes[host] = None
            if trusted and culprit.hardware:
                drain[host] = None
    return Nodes(tuple(drain), tuple(host for host in nodes if host not in drain))


def _listed(nodes: tuple[str, ...]) -> str:
    return ", ".join(map(short, nodes)) if len(nodes) <= _MOST_LISTED else f"{len(nodes)} hosts"


def is_node_name(name: str) -> bool:
    """Whether a name can be passed unquoted to a shell and to Slurm."""
    return _NODE_NAME.fullmatch(name) is not None


def hostlist(names: Iterable[str]) -> str:
    """Distinct names as a hostlist, in order; names with the same prefix and a number at the end share brackets.

    Numbers with leading zeros share brackets only with those of the same length. Raises ValueError for a name that
    `is_node_name` rejects.

    Ranges are used only if Slurm expands them to the same names.
    """
    numbers: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    distinct = sorted(set(names))
    padded = {_group(name) for name in distinct if (match := _NUMBERED.fullmatch(name)) and match[2].startswith("0")}
    for name in distinct:
        if not is_node_name(name):
            raise ValueError(f"{name!r:.100} is not a valid node name")
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain.append(name)
            continue
        group = _group(name)
        key = group if group in padded and len(match[2]) > 1 else (match[1], 1)
        numbers.setdefault(key, []).append(int(match[2]))
    lists = [_with_brackets(prefix, width, group) for (prefix, width), group in sorted(numbers.items())]
    return ",".join([*plain, *lists])


def _group(name: str) -> tuple[str, int]:
    """The prefix of a numbered name, and the number of digits at its end."""
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    return match[1], len(match[2])


def _with_brackets(prefix: str, width: int, numbers: list[int]) -> str:
    """The numbers after their common prefix, neighbours as ranges."""
    ranges = runs(numbers)
    words = [f"{begin:0{width}}" if begin == end else f"{begin:0{width}}-{end:0{width}}" for begin, end in ranges]
    return f"{prefix}{words[0]}" if len(numbers) == 1 else f"{prefix}[{','.join(words)}]"


class State(StrEnum):
    """Whether a cause still acts on its job."""

    OPEN = "open"
    OVER = "over"
    ENDED = "ended-with-the-job"


class RunCause(Struct, frozen=True):
    """What one cause at one place cost a run. `kind`: of the loss; `ranks`: global ranks, none for the whole job;
    `hosts`: of these ranks, as far as known.

    `lost_share`: of the time of the whole run. `first_step`, `last_step`: the first and the last step that it slowed
    down; `since`, `until`: when the first began and the last ended, seconds since the epoch, None where unknown.
    `windows`: how many show it; `clear_windows`: how many between the first and the last of these do not;
    `worst_window`: the one that lost most to it, and `worst_share`: of its time. `redone_s`: the part of `lost_s` in
    steps that a later attempt did again: the bill has it as lost work. `do`: what to do about it first, as the report
    on `worst_window` says; None if it says nothing, or was not asked.
    """

    kind: LossKind | None
    cause: str
    ranks: tuple[Ordinal, ...]
    hosts: tuple[str, ...]
    lost_s: Seconds
    lost_share: Proportion
    gpu_hours_lost: Amount
    first_step: Ordinal | None
    last_step: Ordinal | None
    since: Moment | None
    until: Moment | None
    state: State
    windows: Count
    worst_window: Count
    worst_share: Proportion
    redone_s: Seconds
    clear_windows: Count = 0
    do: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether it says who or why."""
        return self.kind is not None and self.cause not in (UNEXPLAINED, str(self.kind))


class RunVerdict(Struct, frozen=True):
    """What a run lost in all its windows.

    `recorded_s`: seconds of the recorded steps whose losses are known; `covered_share`: these, of the time of the whole
    run, `wall_s`. `lost_share`: of that time, too. `causes`: worst first. `ended`: how the job ended, None while it
    runs and if unknown. `notes`: what the times cannot be trusted for. `of_windows`: how many the job has, for the
    verdict on a part of its run; None for the whole run.

    It is a ledger: its causes add up to what the windows lost, and they are rows of the bill.
    """

    first_step: Ordinal
    last_step: Ordinal
    windows: Count
    wall_s: Seconds
    covered_share: Proportion
    recorded_s: Seconds
    lost_s: Seconds
    lost_share: Proportion
    gpu_hours_lost: Amount
    causes: Sequence[RunCause]
    ended: str | None
    notes: Sequence[str]
    of_windows: Count | None = None

    @property
    def alarming(self) -> tuple[RunCause, ...]:
        """The causes to tell a person about, worst first: those that cost enough of a window to be its headline."""
        return tuple(cause for cause in self.causes if cause.kind and cause.worst_share >= SMALLEST_ALARMING_SHARE)
