"""What is concluded: trust, verdict, findings, fixes, the answer in words, nodes to drain, the verdict of a run.

In: what the analysis found. Out: plain data, with every sentence that a reader sees. While the diagnosis is made, its
causes and fixes are these, too, and carry what prices them beside (`Cause`, `PricedFix`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import UNSET, Struct

from tracekit.analysis.attribution.patterns import SpacePattern, TimePattern
from tracekit.analysis.numeric.statistics import Estimate
from tracekit.base.limits import Amount, Count, Finite, Moment, Number, Ordinal, Proportion, Seconds
from tracekit.base.text import runs, short
from tracekit.report.finding import OF_POST_TRAINING, LossKind, Place, SeenOnce, Spent, Unit
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

    replay_error: Amount | None  #: |T(launch delays kept) - T(recorded)| / T(recorded)
    discrepancy: Number  #: T(recorded) / T(original) - 1, the share that launch delays add
    unexplained: Number  #: what is left of that once the named causes are gone; above 0.05 the job is not trustworthy
    #: both are at most 5 %, S is at least 0.98, the clocks are known, and what was not recorded cannot turn the verdict
    trustworthy: bool
    reasons: list[str]  #: why not, empty where trustworthy
    clamped_transfers: Maybe[Count] = UNSET  #: transfers more than 10 ms below zero, taken as 0
    clamped_delays: Maybe[Count] = UNSET  #: launch delays more than 10 ms below zero, taken as 0
    #: op traces and recordings: losses and guesses while reading, no reason for distrust
    notes: Maybe[list[str]] = UNSET
    #: recordings: how long GPU ops were ready before they started, 99th percentile, of `communication` and `compute`
    start_gap_p99_s: Maybe[dict[str, Seconds | None]] = UNSET
    edges: Maybe[Count] = UNSET  #: recordings: dependencies
    inferred_edges: Maybe[Count] = UNSET  #: recordings: dependencies that were not recorded
    violations: Maybe[Count] = UNSET  #: recordings: dependencies that the times contradict by more than 5 us
    #: recordings: by rank, how far the host's clock was ahead of the GPU's
    host_ahead_of_gpu_s: Maybe[dict[Ordinal, Finite]] = UNSET


class Loss(Struct, frozen=True):
    """What one kind of loss costs."""

    kind: LossKind  #: as in `verdict`
    lost_s: Finite  #: seconds of the mean step, of time that kinds share its share
    causes: list[Count]  #: places in `causes` of the report, in the order in which to address them
    explained_s: Finite  #: seconds that go when these causes go
    #: pipelines: seconds that it costs by itself, if it shares time with other kinds
    alone_s: Maybe[Finite] = UNSET


def shared_s(
    together_s: float, losses: Mapping[LossKind, float], causes: Sequence[tuple[LossKind, float, float]]
) -> tuple[list[float], dict[LossKind, float]]:
    """Seconds that each cause costs of `together_s`, and what each kind of loss costs beyond its causes.

    `losses`: seconds of each kind by itself; `causes`: the kind of each, what it costs beside all others, and with them
    gone.

    Causes overlap: one may cost less beside the others than once they are gone, or more. Each gets the mean of both,
    which of two causes adds up to what they cost together; of more, as much more or less as makes it add up. What no
    cause of a kind costs comes after all causes, the first kind first.
    """
    mean_s = [(max(saved_s, 0.0) + max(alone_s, 0.0)) / 2 for _, saved_s, alone_s in causes]
    most_s = [max(saved_s, alone_s, 0.0) for _, saved_s, alone_s in causes]
    left_s, rests_s = max(together_s - sum(mean_s), 0.0), dict[LossKind, float]()
    for kind, lost_s in losses.items():
        named_s = sum(most for most, (of_kind, *_) in zip(most_s, causes, strict=True) if of_kind is kind)
        rests_s[kind] = min(max(lost_s - named_s, 0.0), left_s)
        left_s -= rests_s[kind]
    of_causes_s, added_s = together_s - sum(rests_s.values()), sum(mean_s)
    if of_causes_s < added_s:
        return [seconds * of_causes_s / added_s for seconds in mean_s], rests_s
    beyond_s = sum(most_s) - added_s
    toward = min((of_causes_s - added_s) / beyond_s, 1.0) if beyond_s > 0 else 0.0
    return [mean + toward * (most - mean) for mean, most in zip(mean_s, most_s, strict=True)], rests_s


class LossParts(Struct, frozen=True):
    """What the loss that S measures consists of."""

    lost_s: Finite  #: T(original) - T(ideal)
    explained_s: Finite  #: what goes of it with the named causes; 0 where noise explains nearly all of it
    noise_s: Finite  #: what the noise of the run makes of it
    unexplained_s: Seconds  #: the rest, at least 0; the verdict mentions it from 2 % of the step and `error_s` on
    error_s: Seconds  #: three standard errors of the rest


class CauseOfCulprit(Struct, frozen=True):
    """One cause on the rank that the others wait for."""

    cause: str  #: `kind` in `causes`
    saved_s: Finite  #: as in `causes`
    evidence: str  #: its figures in words
    effect: str  #: as in `causes`
    action: str  #: its `suggested_fix`


class RankToBlame(Struct, frozen=True):
    """The rank that the others wait for."""

    rank: Ordinal  #: the rank
    host: str | None  #: its node, null if unknown
    saved_s: Finite  #: seconds saved with this rank at the pace of the others
    #: how much later than the last but one it arrives at collectives, seconds in all; null for op traces
    sole_delay_s: Seconds | None
    waited_s: Seconds | None  #: how long all others wait for it, seconds in all; null for op traces
    causes: list[CauseOfCulprit]  #: the findings on this rank, costliest first


class Verdict(Struct, frozen=True):
    """The kind of loss that costs most, and the total loss."""

    #: `straggler`, `input-bound`, `host-bound`, `communication-bound`, `compute-bound`, `idle`, `stalls`, `evaluation`;
    #: of post-training `queueing`, `tail`, `engines`, `tools`, `reward`, `sync`, `unaccounted` where most time is in no
    #: phase, `phases` where a log does not tell what is lost; `minor` where the largest loss is below 5 % of the step,
    #: or one rank of several was recorded and shows no larger one, `balanced`, or `contradiction` where S is below
    #: 0.98, or times of post-training contradict each other
    kind: LossKind
    #: what readers see of the kind: `uneven work` for a `straggler` whose leading cause is that stages, DP ranks or
    #: microbatches have unequal work, else `kind`
    label: str
    headline_s: Seconds  #: seconds of the mean step that go to this kind of loss, by itself
    #: seconds of the mean step that are lost in all; of a recording of torch.profiler, of all its steps as they run
    #: without it
    lost_s: Seconds
    share: Proportion  #: of the step, lost in all
    lost_gpu_hours: Amount | None  #: GPU-hours lost in all in the traced steps
    lost_gpu_hours_per_day: Amount | None  #: GPU-hours that a day at this rate loses
    sentence: str  #: the verdict in words
    confidence: Proportion | None  #: of the leading cause, 0 to 1; null where no cause is named
    losses: list[Loss]  #: what each kind of loss costs, first what gives back most
    parts: LossParts  #: what the loss that S measures consists of
    of_mean_ops: bool  #: the loss is what S counts, compared with mean ops
    first_fix: Count | None  #: place in `fixes` of what to do first; null if nothing is known to help
    who: str | None  #: as in `answer`
    cost: str | None  #: as in `answer`
    action: str | None  #: as in `answer`
    formula: Maybe[str] = UNSET  #: what `lost_s` is the value of, as `--explain` prints it
    #: recordings: what goes if transfers take no time once all ranks are there
    exposed_communication_s: Maybe[Seconds] = UNSET
    #: op traces and recordings: the rank that the others wait for; null if no rank stands out
    culprit: Maybe[RankToBlame | None] = UNSET


class Patterns(Struct, frozen=True):
    """How the slowdown runs over steps and workers; null for jobs that are no pipelines."""

    time: TimePattern | None  #: over the steps; null if the job is no pipeline
    space: SpacePattern | None  #: over the workers; null if the job is no pipeline


class EvidenceFigure(Struct, frozen=True):
    """A figure that supports a cause."""

    name: str  #: what was measured
    value: Number  #: the figure
    needed: Finite  #: the threshold it passes; 0 where it only informs
    unit: Unit  #: `share`, `times`, `s`, `nats` (of one likelihood over another), or empty for a plain number
    words: str  #: the figure as people read it: `compute beyond that of its peers: 80% (4% needed)`


class Finding(Struct, frozen=True):
    """One cause of a job's slowness. What hides behind another cause costs more once that is gone."""

    kind: str  #: machine-readable name of the cause
    title: str  #: the cause in words
    where: Place  #: its place
    where_text: str  #: its place in words
    since_step: Ordinal | None  #: since when; null: all along, or at times
    when: str  #: when it acts, in words
    time: TimePattern | None  #: how its strength runs over the steps
    signature: str  #: what it looks like
    effect: str  #: what it does here, with its size: "computes 80% slower than its peers; noise alone makes 0.4%"
    evidence: tuple[EvidenceFigure, ...]  #: figures that speak for it
    #: 0 to 0.99, in whole percent: how sure it is that the cause exists where it is named; 1 for *healthy*
    confidence: Proportion
    saved_s: Finite  #: step time that goes if this cause alone goes
    alone_s: Finite  #: step time it costs once all other causes are gone
    bound: bool  #: both are upper bounds
    saved_when_acting_s: Number  #: as `saved_s`, over the steps in which it acts; null where that is all of them
    refuted_by: str  #: what would speak against it
    next_check: str  #: what to look at next
    suggested_fix: str  #: what to do about it: a command, a setting, or whom to ask
    spent: Spent | None  #: of a recording of one rank: what its time is spent on
    #: of a recording of torch.profiler: what its end saves of a step without the profiler; null if that is not known
    saves_step_s: Estimate | None
    #: the steps in which it was seen, if they are one or two, so that no rate follows; null if it returns
    once: SeenOnce | None
    costs: str  #: what it costs, in words
    priced: bool  #: a replay tells what it costs; else the trace is at fault, or nothing is wrong


class Fix(Struct, frozen=True):
    """One fix and its price."""

    kind: str  #: machine-readable name of the fix
    title: str  #: what to do
    where: Place  #: where
    where_text: str  #: where, in words
    new_step_s: Number  #: mean recorded step time then (launch delays stay); null where withheld
    #: step time saved by ops as fast as their peers', everything else as recorded; `questions` are priced in the same
    #: way
    saved_s: Number
    saved_gpu_hours_per_day: Number  #: the same in GPU-hours a day
    error_s: Seconds  #: plus or minus: replay error, and half the 95 % interval of the saving over the steps
    bound: bool  #: it saves at most this; how much of it is reached is open
    withheld: str | None  #: why no saving is promised
    assumes: str | None  #: what the price takes for granted and the trace does not show
    cause: str | None  #: kind of the cause it is for; null for what any job could try
    confidence: Proportion | None  #: confidence of that cause, of a combination the lowest of its parts
    edit: str | None  #: the fix as text for `--fix`, which gives it the same price; null if it is no change of costs
    details: dict[str, Any]  #: the plan as plain data; depends on `kind`
    #: of a recording of torch.profiler: what it saves of a step without the profiler, by which fixes are ordered; null
    #: if that is not known
    saves_step_s: Estimate | None
    #: of a recording of torch.profiler: the step without the profiler, as it is; null if that is not known
    unprofiled_step_s: Seconds | None

    @property
    def worth_s(self) -> float:
        """The key that orders fixes: the saving without the profiler, if the job was recorded with one."""
        return (self.saved_s or 0.0) if self.saves_step_s is None else self.saves_step_s.value


class CauseInWords(Struct, frozen=True):
    """One cause in sentences, with everything that an alert about it needs."""

    kind: str  #: as in `causes`
    part: str | None  #: as in `culprits`; null for what concerns the whole job
    what: str  #: place, effect and cost
    who: str  #: ranks and nodes, when it acts, and how sure it is
    why: str  #: its `effect`
    check: str  #: its `next_check`
    fix: str | None  #: what to do first about it, and what that saves, or why no saving is promised
    ranks: tuple[Ordinal, ...]  #: whom it sits on, as far as known
    hosts: tuple[str, ...]  #: their nodes, as far as known
    gpu_uuids: tuple[str, ...]  #: their GPUs, as far as known
    cost_s: Seconds  #: seconds of the mean step that it costs
    share: Amount  #: the same, of the recorded step
    #: 0 to 0.99, in whole percent: how sure it is that the cause exists where it is named; 1 for *healthy*
    confidence: Proportion
    first_step: Ordinal | None  #: since when; null: in every step, or at times
    saved_gpu_hours_per_day: Number  #: what `fix` gives back; null where nothing is promised
    metrics: Maybe[str] = UNSET  #: with `--metrics`: what metrics of its machines say: [Metrics](hardware.md)
    #: of a running job: [the line of code](live.md#the-line-of-code) at which its rank differs from healthy peers
    code: Maybe[str] = UNSET


class Culprit(Struct, frozen=True):
    """One rank that a cause is on."""

    rank: Ordinal | None  #: the recorded rank; null for a worker that was not recorded
    dp_rank: Ordinal | None  #: its place; null if the job is no pipeline
    pp_rank: Ordinal | None  #: its place; null if the job is no pipeline
    host: str | None  #: its node; null where the trace does not say
    gpu_uuid: str | None  #: its GPU; null where the trace does not say
    #: what is slow: `compute`, `workload`, `optimizer`, `data-loading`, `host`, `python-gc`, `process`, `checkpoint`,
    #: `evaluation`, `network` or `unrecorded`
    part: str
    cost_s: Seconds  #: seconds of the mean step that the whole cause costs
    #: 0 to 0.99, in whole percent: how sure it is that the cause exists where it is named; 1 for *healthy*
    confidence: Proportion
    first_step: Ordinal | None  #: since when; null: in every step, or at times
    #: the recording shows that its machine is at fault (a throttled GPU): only then its node is to be drained
    hardware: bool

    @property
    def worker(self) -> Worker | None:
        """The worker that the rank belongs to, None if the job is no pipeline."""
        return None if self.dp_rank is None or self.pp_rank is None else Worker(self.dp_rank, self.pp_rank)


class Answer(Struct, frozen=True):
    """Sentences without a full stop, None if there is nothing to say."""

    headline: str  #: who costs how much of the step, and how; as `verdict.sentence`
    cost: str | None  #: what is lost, per step and per day; null where nothing is
    who: str | None  #: ranks and nodes of the leading cause, when it acts, and how sure the cause is
    why: str | None  #: its `effect`
    check: str | None  #: where else to look: its `next_check`
    fix: str | None  #: what to do first about it, and what that saves, or why no saving is promised
    action: str | None  #: what to do first, alone
    saves: str | None  #: what that saves, alone, or why no saving is promised; null where it has no price
    others: tuple[str, ...]  #: the other causes that cost time, with what they cost
    stalls: tuple[str, ...]  #: isolated slow steps, longest first: "step 10: +290.0 ms, data"
    causes: tuple[str, ...]  #: where each of the object's `causes` is and what it does, in their order
    places: tuple[str, ...]  #: only where: ranks and nodes
    trust: str  #: why to believe the report, or why not
    culprits: tuple[Culprit, ...]  #: the ranks that causes sit on, those of the costliest cause first
    accounts: tuple[CauseInWords, ...]  #: each cause that costs something, the leading one first


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
    """What one cause at one place cost a run."""

    kind: LossKind | None  #: kind of loss, as in `Loss`; null for losses that hide each other
    cause: str  #: kind of finding, `unexplained`, or the kind of loss if no cause is known
    ranks: tuple[Ordinal, ...]  #: global ranks; empty for the whole job
    hosts: tuple[str, ...]  #: hosts of these ranks, as far as known; ranks that moved to other hosts are another cause
    lost_s: Seconds  #: seconds lost in all windows
    lost_share: Proportion  #: share of the time of the whole run
    gpu_hours_lost: Amount | None  #: the same in GPU-hours; null if the GPUs of the job are not known
    first_step: Ordinal | None  #: first step that it slowed down
    last_step: Ordinal | None  #: last step that it slowed down
    since: Moment | None  #: when that first step began, seconds since 1970
    until: Moment | None  #: when that last step ended
    #: `open`, `over` (two windows or the end of the job without it, or its ranks moved) or `ended-with-the-job`
    state: State
    windows: Count  #: number of windows that show it
    worst_window: Count  #: the window that lost most to it
    worst_share: Amount  #: share of the time of that window
    redone_s: Seconds  #: the part of `lost_s` in steps that a later attempt did again: lost work on the bill
    clear_windows: Count = 0  #: windows between the first and the last of these that do not show it
    #: what to do first about it, as the report on `worst_window` says; null if it says nothing, or was not asked
    do: str | None = None
    #: seconds that the run would have been shorter without this cause alone, as `whatif` prices it; causes that overlap
    #: share in `lost_s` what goes only with several of them; null where an older version wrote it
    saved_s: Seconds | None = None
    gpu_hours_saved: Amount | None = None  #: the same in GPU-hours; null if the GPUs of the job are not known

    @property
    def is_known(self) -> bool:
        """Whether it says who or why."""
        if self.kind in OF_POST_TRAINING:  # each of these kinds of loss is a cause
            return True
        return self.kind is not None and self.cause not in (UNEXPLAINED, str(self.kind))


class RunVerdict(Struct, frozen=True):
    """What a run lost in all its windows.

    It is a ledger: its causes add up to what the windows lost, and they are rows of the bill.
    """

    first_step: Ordinal  #: first step of all windows
    last_step: Ordinal  #: last step of all windows
    windows: Count  #: number of windows
    wall_s: Seconds  #: seconds of the whole run, as on the bill: with its start, pauses and restarts
    covered_share: Proportion  #: share of that time in recorded steps whose losses are known
    recorded_s: Seconds  #: seconds of these steps
    lost_s: Seconds  #: seconds that they lost
    lost_share: Proportion  #: share of the time of the whole run
    gpu_hours_lost: Amount | None  #: the same in GPU-hours; null if the GPUs of the job are not known
    causes: Sequence[RunCause]  #: what lost it, worst first
    ended: str | None  #: how the job ended; null while it runs, and if unknown
    notes: Sequence[str]  #: what to bear in mind about its times
    of_windows: Count | None = None  #: windows of the job, for a verdict on a range of it; null for the whole run
    #: the first of the notes about clocks that contradict each other or reports of another version; null without one
    coverage_note: str | None = None

    @property
    def alarming(self) -> tuple[RunCause, ...]:
        """The causes to tell a person about, worst first: those that cost enough of a window to be its headline."""
        return tuple(cause for cause in self.causes if cause.kind and cause.worst_share >= SMALLEST_ALARMING_SHARE)
