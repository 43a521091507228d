"""Command-line values with a small grammar of their own.

In: what the user typed. Out: numbers, or a SelectionError that shows the expected form. Selections have their own
module, `analysis/whatif/selection_text.py`, because the dashboard reads them too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from tracekit.base.errors import SelectionError
from tracekit.base.exit_codes import ExitCode
from tracekit.base.stderr import say
from tracekit.base.text import did_you_mean

if TYPE_CHECKING:
    from tracekit.report.report import Report


_MOST_STEPS = 1_000_000
#: Figures of a report that a condition may compare.
_FIGURES = ("slowdown", "waste", "replay_error", "discrepancy")


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """`9,9,9,9` as layers per stage. Raises SelectionError for anything else."""
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise SelectionError(f"--layers {text!r:.200}; expected a number per stage, such as 9,9,9,9")
    return tuple(int(count) for count in text.split(","))


def parse_steps(text: str, option: str) -> list[int]:
    """`3,5,9-12`, the value of `option`, as step numbers. Raises SelectionError for anything else."""
    if not re.fullmatch(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", text):
        raise SelectionError(f"{option} {text!r:.200}; expected numbers and ranges such as 12,40-45")
    steps: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        count = int(last or first) - int(first) + 1
        if count < 1 or len(steps) + count > _MOST_STEPS:
            raise SelectionError(
                f"{option} {part!r}; expected a range from a smaller to a larger number, and at most {_MOST_STEPS}"
                " numbers in all"
            )
        steps.extend(range(int(first), int(last or first) + 1))
    return steps


def parse_share(text: str, option: str) -> float:
    """`3%` or `0.03`, the value of `option`, as 0.03. Raises SelectionError for anything else."""
    match = re.fullmatch(r"\s*([0-9]{0,6}\.?[0-9]{1,9})\s*(%?)\s*", text)
    if not match:
        raise SelectionError(f"{option} {text!r:.200}; expected a share such as 3% or 0.03")
    return float(match[1]) / (100 if match[2] else 1)


class Condition:
    """A condition such as `slowdown>1.1` or `python-gc>5%`, for --fail-on.

    Raises SelectionError if it cannot be understood.
    """

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"\s*([\w-]+)\s*(>=|<=|>|<)\s*([0-9]{0,15}\.?[0-9]{1,15})\s*(%?)\s*", text)
        if not match or (match[1] not in _FIGURES and match[1] not in _kinds()):
            meant = did_you_mean(match[1], [*_FIGURES, *_kinds()]) if match else ""
            raise SelectionError(
                f"--fail-on {text!r:.200}; expected slowdown, waste, replay_error, discrepancy or a kind of cause"
                f" compared with a number, such as 'slowdown>1.1' or 'python-gc>=5%'{meant}"
            )
        self.figure, self.comparison = match[1], match[2]
        self.bound = float(match[3]) / (100 if match[4] else 1)

    def judge(self, report: Report) -> ExitCode:
        """CONDITION if the figure satisfies the condition, DONE if not, and NO_ANSWER, with a reason on stderr, if the
        noise of the steps does not allow to tell. The figure of a cause is its share of the step.

        Raises SelectionError if the condition is about a cause whose detector failed.
        """
        if self.figure in ("slowdown", "waste"):
            from tracekit.analysis.attribution.gate import unclear_slowdown

            bound = self.bound if self.figure == "slowdown" else 1 / max(1 - self.bound, 1e-9)
            times = report.step_times()
            if words := unclear_slowdown(times.original, times.ideal, bound):
                say(f"tracekit: --fail-on {self.figure}: cannot tell: {words}")
                return ExitCode.NO_ANSWER
        return ExitCode.CONDITION if self._holds(report) else ExitCode.DONE

    def _holds(self, report: Report) -> bool:
        if self.figure in report.failed:
            raise SelectionError(f"--fail-on {self.figure}: cannot be judged, because its detector failed")
        figures = {
            "slowdown": report.slowdown,
            "waste": report.waste,
            "replay_error": report.trust.replay_error,
            "discrepancy": report.trust.discrepancy,
        }
        of_kind = sum(account.share for account in report.answer.accounts if account.kind == self.figure)
        value = figures.get(self.figure, of_kind)
        if value is None:
            return False
        return {
            ">": value > self.bound,
            ">=": value >= self.bound,
            "<": value < self.bound,
            "<=": value <= self.bound,
        }[self.comparison]


def _kinds() -> Collection[str]:
    from tracekit.analysis.detectors.all_detectors import kinds

    return kinds()
