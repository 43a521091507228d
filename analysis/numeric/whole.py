"""Quantities of a whole job, of which a process may hold only some steps.

In: what the steps of this process contribute to a quantity. Out: the quantity. The usual costs, the rules that receives
follow and the clocks are properties of the job, everything else is one of a step. Code that needs such a property asks
a `Whole` for it, in the same order whichever steps it has. If all steps are here, the answer follows at once. If others
are elsewhere, `Asked` ends the work; once all of them have asked the same, whoever holds their parts merges them and
starts the work anew, with the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

Part = TypeVar("Part")
Answer = TypeVar("Answer")
Name = TypeVar("Name", bound=Hashable)


class Whole:
    """A job of which all steps are here."""

    #: Whether other steps of the job are elsewhere.
    divided = False

    def agreed(self, part: Callable[[], Part], merge: Callable[[Sequence[Part]], Answer]) -> Answer:
        """What `merge` makes of the `part` of each batch of steps, in the order of the steps."""
        return merge([part()])


#: The usual job.
UNDIVIDED = Whole()


class Asked(Exception):  # noqa: N818 - no error: it ends the work until the answer is known
    """The next question about the whole job: the `part` of the steps that are here, and how to `merge` all parts."""

    def __init__(self, part: Any, merge: Callable[[Sequence[Any]], Any]) -> None:
        super().__init__(merge.__qualname__)
        self.part, self.merge = part, merge


class Divided(Whole):
    """Some steps of a job. `answers`: to the first questions about the whole job, in their order; `asked`: how many of
    them have been.
    """

    divided = True

    def __init__(self, answers: Sequence[Any], asked: int = 0) -> None:
        self.answers, self.asked = answers, asked

    def agreed(self, part: Callable[[], Part], merge: Callable[[Sequence[Part]], Answer]) -> Answer:
        """The next of the answers. Raises `Asked` if it is not known yet."""
        if self.asked == len(self.answers):
            raise Asked(part(), merge)
        self.asked += 1
        answer: Answer = self.answers[self.asked - 1]
        return answer


def by_name(parts: Sequence[Mapping[Name, Part]]) -> dict[Name, list[Part]]:
    """The values of each name in the parts that have it, in their order."""
    grouped: dict[Name, list[Part]] = {}
    for part in parts:
        for name, value in part.items():
            grouped.setdefault(name, []).append(value)
    return grouped
