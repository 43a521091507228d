"""Custom what-if questions, answered.

In: replays. Out: `Question` and `ByLabel`, as reports hold them, and their tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tracekit.analysis.attribution.by_label import Share
from tracekit.base.text import cut, printable, seconds
from tracekit.report.section import Table

_FIX_MEANS = "fix: as fast as their peers, everything else as recorded, launch delays kept; as fixes are priced."
_KEEP_MEANS = "keep only: the question of the paper; everything else ideal, without launch delays."
_NO_PEERS = (
    "ideal is the pace of the other steps: no other rank was recorded; --fix 'LABEL=VALUE * 0.5' prices a change"
)
#: The number of values of a label to show, and of characters of each.
_MOST_VALUES, _LONGEST_VALUE = 20, 48


class Question(Struct, frozen=True):
    """One custom what-if question and its answer.

    `step_time_s`: the mean recorded step after the edit, as fixes are priced; of `keep only`, T of its replay, without
    launch delays, and what it saves is compared with T(original). `error_s`: of `saved_s`, as of a fix.
    """

    question: str
    ops: int
    step_time_s: float
    saved_s: float
    error_s: float
    saved_gpu_hours_per_day: float


class ByLabel(Struct, frozen=True):
    """What the ops of each value of a label, or of a combination of labels, cost; costliest first."""

    labels: tuple[str, ...]
    shares: tuple[Share, ...]


def question_table(answered: Sequence[Question], whole: str, *, daily: bool, fix_means: str = _FIX_MEANS) -> Table:
    """The answers to custom questions. `whole`: what times are of, "step" or "recording"; `daily`: with GPU-hours."""
    keeps = [asked.question.startswith("keep only ") for asked in answered]
    meanings = [*([] if all(keeps) else [fix_means]), *([_KEEP_MEANS] if any(keeps) else [])]
    rows = [
        (
            printable(asked.question),
            seconds(asked.step_time_s),
            f"{seconds(asked.saved_s)} ({asked.saved_s / (asked.step_time_s + asked.saved_s):+z.1%})",
            *([f"{asked.saved_gpu_hours_per_day:,.1f}"] if daily else []),
        )
        for asked in answered
    ]
    heads = ("What if", f"{whole} time", f"saved per {whole}", *(["GPU-hours a day"] if daily else []))
    return Table("Questions", heads, tuple(rows), " ".join(meanings))


def label_table(group: ByLabel, *, peers: bool = True) -> Table:
    """What each value of a label costs, costliest first. `peers`: whether there are other ranks to compare with."""
    rows = [
        (
            cut(printable(", ".join(map(str, share.values))), _LONGEST_VALUE),
            f"{share.ops:,}",
            seconds(share.added_s),
            change_text(share.removed_s),
        )
        for share in group.shares[:_MOST_VALUES]
    ]
    names, more = " x ".join(group.labels), len(group.shares) > _MOST_VALUES
    notes = [
        *([f"the costliest {_MOST_VALUES} of {len(group.shares)}; all with --json or --csv"] if more else []),
        *([] if peers else [_NO_PEERS]),
    ]
    return Table(f"By {names}", (names, "ops", "costs alone", "if average"), tuple(rows), "; ".join(notes) or None)


def change_text(saved_s: float) -> str:
    """The change of a step that saves so much, with its sign."""
    shown, sign = seconds(abs(saved_s)), "-" if saved_s > 0 else "+"
    return "0" if float(shown.split()[0]) == 0 else f"{sign}{shown}"
