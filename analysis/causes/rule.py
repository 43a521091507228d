"""The interface of a rule: one kind of cause, and where a job shows it.

In: `Evidence`. Out: `Candidate`s, each with its evidence and the change that undoes it. A rule looks only for a
signature; `find` asks the replay afterwards whether a candidate costs anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from tracekit.analysis.causes.model import Candidate, CauseKind
from tracekit.analysis.evidence.evidence import Evidence


class Rule(ABC):
    """One kind of cause: how it shows, what would refute it, what to check next, what to do.

    `suggested_fix`: an action, with names to fill in (`remedies.py`).
    """

    kind: ClassVar[CauseKind]
    title: ClassVar[str]
    signature: ClassVar[str]
    refuted_by: ClassVar[str]
    next_check: ClassVar[str]
    suggested_fix: ClassVar[str]

    @abstractmethod
    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """Every place in the job where the signature shows."""
