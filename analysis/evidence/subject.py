"""What the diagnosis needs to know of a job, whatever its shape.

In: nothing. Out: `Subject`, the interface of `Evidence` (pipelines) and `OpEvidence` (everything else).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from tracekit.analysis.attribution.attribution import STRAGGLING_SLOWDOWN, Trust
from tracekit.analysis.attribution.chance import Parts
from tracekit.analysis.evidence.naming import Names
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.numeric.estimate import Estimate
from tracekit.analysis.numeric.means import saving_error_s
from tracekit.analysis.whatif.interventions import Intervention
from tracekit.report.finding import Finding, Place
from tracekit.trace.facts import Fact, Lack
from tracekit.trace.model import Worker

if TYPE_CHECKING:
    from tracekit.analysis.detectors.detector import Candidate, Detector
    from tracekit.analysis.fixes.plan import Plan


class Subject(Struct, frozen=True, eq=False, dict=True):
    """A job under diagnosis. Seconds are of the mean step; of a recording of GPUs, which is one step, of all of it."""

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
    @abstractmethod
    def names(self) -> Names:
        """The names of places in the job."""

    @property
    @abstractmethod
    def lacks(self) -> tuple[Lack, ...]:
        """What the source cannot show."""

    def shows(self, fact: Fact) -> bool:
        """Return whether the source shows a fact."""
        return all(lack.fact is not fact for lack in self.lacks)

    @property
    @abstractmethod
    def metadata(self) -> Mapping[str, Any]:
        """Free metadata of the trace."""

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

    @cached_property
    def unchanged(self) -> Floats:
        """Step times of the job without changes, with launch delays, seconds, [steps]."""
        return self.step_times(())

    @property
    def unchanged_s(self) -> float:
        """Their mean, seconds."""
        return float(self.unchanged.mean())

    @property
    def unprofiled_step(self) -> Estimate | None:
        """The step without the profiler that recorded the job, seconds; None if none did, or if that is not known."""
        return None

    def saves_step(
        self, changes: Sequence[Intervention], *, bound: bool = False, after: Intervention | None = None
    ) -> Estimate | None:
        """Return what these changes save of that step, seconds. `bound`: at most so much. `after`: once it is done."""
        del changes, bound, after
        return None

    @property
    @abstractmethod
    def recorded_s(self) -> float:
        """The mean recorded step; of a recording, from its first event to its last; seconds."""

    @abstractmethod
    def step_times(self, changes: Sequence[Intervention]) -> Floats:
        """Return the duration of each step after these changes, seconds, [steps]."""

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

    @abstractmethod
    def candidates(self, detector: Detector) -> Iterator[Candidate]:
        """Yield what a detector finds in the job."""

    def reviewed(self, detector: Detector, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates of all detectors as this one sees them."""
        del detector
        return candidates

    @property
    @abstractmethod
    def measured_s(self) -> float:
        """The mean step as measured, without stalls between steps, seconds."""

    @property
    @abstractmethod
    def replay_error(self) -> float:
        """How far the replay with launch delays misses the recording, as a share of it."""

    @property
    @abstractmethod
    def smallest_cost_s(self) -> float:
        """Findings that cost less, gone alone or with all others gone, are not reported, seconds."""

    @abstractmethod
    def fixes(self, detector: Detector, found: Finding) -> Iterator[Plan]:
        """Yield a detector's fixes of one of its findings."""

    @abstractmethod
    def seen(self, found: Finding) -> str:
        """Return where exactly a finding is, and when it acts, in words that follow its place."""

    @abstractmethod
    def fit(self, trust: Trust) -> str:
        """Return how well the replay fits the recording, or why it is not trusted, in words."""

    def undecided(self) -> str:
        """Return who looks slow, but no slower than chance explains, and what would decide it; empty if nobody does."""
        return ""

    @abstractmethod
    def has(self, where: Place) -> bool:
        """Return whether the job has a place."""

    @abstractmethod
    def places(self, where: Place) -> Iterator[tuple[int | None, Worker | None]]:
        """Yield the ranks of a place, as far as known, and their workers; none for the whole job."""

    def machines_at_fault(self, where: Place) -> bool:
        """Return whether the recording shows that the machines of a place are slow, and not what runs on them."""
        del where
        return False
