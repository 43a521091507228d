"""Pictures of a run of post-training for its page: phases over steps, requests of the longest generation.

In: an `RlReport`. Out: HTML. Names are escaped wherever they appear.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.rl.generation import Generations
from tracekit.base.text import seconds, short
from tracekit.job.rl_report import RlReport
from tracekit.show.card import plain

#: Pixels of a picture, and the most bars and lines in it.
_WIDE, _HIGH, _MOST_STEPS, _MOST_LINES = 1000, 160, 200, 600
#: Colours of phases, the longest first, in the style sheet.
_COLOURS = 7


def pictures(report: RlReport) -> str:
    """The phases and, if there are any, the requests."""
    made = report.evidence.run.generations
    return _phases(report) + ("" if made is None else _requests(made))


def _phases(report: RlReport) -> str:
    """A bar a step, of its phases."""
    took, names = report.evidence.run.phases, [one.phase for one in report.account.phases]
    if not names:
        return ""
    steps = len(took[names[0]])
    chosen = np.unique(np.linspace(0, steps - 1, min(steps, _MOST_STEPS)).astype(int))
    scale = _HIGH / max(float(np.sum([*took.values()], axis=0).max()), 1e-12)
    width, marks = _WIDE / len(chosen), []
    for place, step in enumerate(chosen.tolist()):
        top = float(_HIGH)
        for number, name in enumerate(names):
            value = float(took[name][step])
            top -= value * scale
            marks.append(
                f'<rect class="what{number % _COLOURS}" x="{place * width:.1f}" y="{top:.1f}" width="{width * 0.9:.1f}"'
                f' height="{value * scale:.1f}"><title>{plain(name)}: {seconds(value)}</title></rect>'
            )
    legend = "".join(f'<span><i class="what{at % _COLOURS}"></i>{plain(name)}</span>' for at, name in enumerate(names))
    few = f" {len(chosen)} of {steps} steps." if len(chosen) < steps else ""
    return _picture("Phases over steps", "".join(marks), _HIGH, f"{legend}{few}")


def _requests(made: Generations) -> str:
    """The requests of the longest generation: a line each, by engine and start."""
    ran, longest = made.ran, int(made.recorded.argmax())
    mine, tail = np.flatnonzero(ran.step == longest), made.longest()[longest]
    mine = mine[np.lexsort((ran.start[mine], ran.engine[mine]))]
    chosen = mine[np.unique(np.linspace(0, len(mine) - 1, min(len(mine), _MOST_LINES)).astype(int))]
    high = 6 if len(chosen) < 100 else 2
    first = float(ran.submit[mine].min())
    scale = _WIDE / max(float(ran.end[mine].max()) - first, 1e-12)

    def lines() -> Iterator[str]:
        for place, one in enumerate(chosen.tolist()):
            submit, start, end = (float(column[one]) for column in (ran.submit, ran.start, ran.end))
            kind = "what5" if ran.tokens[one] > tail else f"what{ran.engine[one] % 2}"
            words = f"{plain(short(made.names[ran.engine[one]]))}: {ran.tokens[one]:,.0f} tokens"
            for colour, begin, until in (("level1", submit, start), (kind, start, end)):
                yield (
                    f'<rect class="{colour}" x="{(begin - first) * scale:.1f}" y="{place * high}"'
                    f' width="{(until - begin) * scale:.1f}" height="{high - 1}"><title>{words},'
                    f" {seconds(until - begin)}</title></rect>"
                )

    legend = (
        '<span><i class="what0"></i><i class="what1"></i>decoding, by engine</span><span><i class="what5"></i>longest'
        ' 5%</span><span><i class="level1"></i>waiting to start</span>'
    )
    return _picture("Requests of the longest generation", "".join(lines()), len(chosen) * high, legend)


def _picture(title: str, marks: str, high: int, legend: str) -> str:
    return (
        f'<section><h2>{title}</h2><div class="scroll"><svg role="img" aria-label="{title}" viewBox="0 0 {_WIDE}'
        f' {high}" width="{_WIDE}" height="{high}">{marks}</svg></div><p class="legend">{legend}</p></section>'
    )
