"""The answer in a few sentences: what is slow, what it costs, who, why, what to do first, and whether to believe it.

In: what the diagnosis found. Out: `Answer`. Terminal, notebook, dashboard, metrics and alerts all show these sentences;
none of them interprets a figure itself.
"""

from __future__ import annotations

from msgspec import UNSET, Struct

from tracekit.report.plain_data import Maybe
from tracekit.trace.model import Worker


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
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    cost_s: float
    share: float
    confidence: float
    first_step: int | None
    saved_gpu_hours_per_day: float | None
    metrics: Maybe[str] = UNSET
    code: Maybe[str] = UNSET


class Culprit(Struct, frozen=True):
    """One rank that a cause is on. `part`: what part of it is slow. `cost_s`: of the whole cause, mean seconds per
    step.

    `rank`, `host`, `gpu_uuid`: None if unknown; `dp_rank`, `pp_rank`: None if the job is no pipeline. `first_step`:
    since when, None if from the beginning. `hardware`: whether the recording shows that its machine is at fault.
    """

    rank: int | None
    dp_rank: int | None
    pp_rank: int | None
    host: str | None
    gpu_uuid: str | None
    part: str
    cost_s: float
    confidence: float
    first_step: int | None
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
