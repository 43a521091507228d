"""What the detectors share that find why one GPU idles.

In: the evidence on a recording. Out: candidates for host work that takes time, each priced by taking it away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace

from tracekit.analysis.detectors.detector import Candidate
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_time import HostPart
from tracekit.analysis.gpu.gpu_times import GpuTimes, NamedTime
from tracekit.analysis.whatif.interventions import Intervention
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Spent, Unit, confidence_from

#: Name what takes at least this share of the recording.
SMALLEST_SHARE = 0.01
#: At most so many findings of one kind.
MOST_OF_A_KIND = 3


def plain(text: str) -> str:
    """A text to put into a remedy, whose own braces are for names of places."""
    return text.replace("{", "{{").replace("}", "}}") if "{" in text else text


def idle_s(gpu: GpuTimes, names: Iterable[str], reasons: Sequence[str]) -> float:
    """How long the GPU waits for what these names say, before its first op too, seconds."""
    wanted = set(names)
    rows: list[NamedTime] = [row for idle in gpu.idle_by_reason if idle.reason in reasons for row in idle.names]
    if any(reason in gpu.before_first.by_reason for reason in reasons):
        rows += gpu.before_first.names
    return sum(row.seconds for row in rows if row.name in wanted)


def share_of(job: RecordingSubject, total_s: float) -> float:
    """The share of the recording, of time that all its ranks spend together."""
    return total_s / (job.recorded_s * len(job.ranks) or float("inf"))


def on_each(job: RecordingSubject, total_s: float) -> str:
    """Time that all ranks spend together, in words: of each, if there are several."""
    ranks = len(job.ranks)
    return seconds(total_s / ranks) + (f" on each of {ranks} ranks" if ranks > 1 else "")


def costly(job: RecordingSubject, parts: Iterable[HostPart]) -> Iterator[HostPart]:
    """Yield the few parts of host work that take a share of the recording worth naming, longest first."""
    large = (part for part in parts if share_of(job, part.seconds) >= SMALLEST_SHARE)
    return islice(large, MOST_OF_A_KIND)


def candidate(
    kind: str, job: RecordingSubject, spent: Spent, effect: str, change: Intervention | None, **more: Any
) -> Candidate:
    """Return the candidate of something that takes time of a recording. `more`: other fields of `Candidate`.

    `spent`: of all ranks together; the candidate has what one of them spends.
    """
    figure = Figure("over the recording", share_of(job, spent.seconds), SMALLEST_SHARE, Unit.SHARE)
    ranks = len(job.ranks)
    spent = replace(spent, seconds=spent.seconds / ranks, count=round(spent.count / ranks))
    return Candidate(kind, Place(), effect, (figure,), confidence_from((figure,)), change, spent=spent, **more)
