"""A job under diagnosis: what the diagnosis and every detector can ask, whatever kind of job it is.

In: nothing. Out: `Subject`, which `PipelineSubject`, `GraphSubject` and `RlSubject` implement. Everything else that
detectors read is a function of a job (`evidence.py`), and None where the job lacks what it needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from enum import Flag, auto
from functools import cached_property
from typing import Any

from msgspec import Struct

from tracekit.analysis.attribution.attribution import STRAGGLING_SLOWDOWN
from tracekit.analysis.attribution.chance import Parts
from tracekit.analysis.evidence.naming import Names
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.numeric.means import saving_error_s
from tracekit.analysis.numeric.robust import NOTHING
from tracekit.analysis.whatif.interventions import Intervention
from tracekit.report.finding import Place
from tracekit.trace.facts import Fact, Lack
from tracekit.trace.model import Worker


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

    @property
    @abstractmethod
    def kind(self) -> JobKind:
        """What kind of job it is."""

    @property
    @abstractmethod
    def gpus(self) -> int:
        """The number of GPUs of the job."""

    @property
    @abstractmethod
    def steps(self) -> Int32s:
        """The step numbers."""

    @property
    def whole(self) -> str:
        """What the times are of: "step" or "recording"."""
        return "step"

    @property
    def steps_in_whole(self) -> int:
        """The number of training steps in one of those."""
        return 1

    @property
    def daily(self) -> bool:
        """Whether it shows enough of the job to say what a day of it costs."""
        return True

    @property
    @abstractmethod
    def everywhere(self) -> str:
        """The whole job as a place, in words."""

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
        return self.slowdown >= STRAGGLING_SLOWDOWN

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

    def saving_error_s(self, saving: Floats, changes: Sequence[Any]) -> float:
        """Return how far the mean saving of these changes, of [steps], can be off."""
        del changes
        return saving_error_s(saving, self.replay_error * self.measured_s)

    def explained(self, change: Intervention, other: Intervention, beside: Sequence[Intervention] = ()) -> float:
        """Return the share of what `change` saves that is gone after `other`, 0 to 1; 0 if it saves nothing. Both in
        the job without what is `beside` them.
        """
        saved_s = float((self.step_times(beside) - self.step_times((*beside, change))).mean())
        left_s = float((self.step_times((*beside, other)) - self.step_times((*beside, other, change))).mean())
        return 1 - min(max(left_s / saved_s, 0.0), 1.0) if saved_s > NOTHING else 0.0

    @abstractmethod
    def has(self, where: Place) -> bool:
        """Return whether the job has a place."""

    def places(self, where: Place) -> Iterator[tuple[int | None, Worker | None]]:
        """Yield the ranks of a place, as far as known, and their workers; none for the whole job."""
        yield from ((rank, None) for rank in where.ranks)
