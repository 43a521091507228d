"""The report on a post-training run as one self-contained HTML page.

In: an `RlReport`, and the log for its pictures. Out: the text of the page. Names are escaped wherever they appear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.rl.report import RlReport, headline
from tracekit.analysis.rl.trajectories import TAIL
from tracekit.base.atomic_write import Kind, starting_with
from tracekit.base.text import seconds, short
from tracekit.show.card import plain, sections
from tracekit.show.documents.page import head
from tracekit.show.rl_words import answer_rows, sizes, tables
from tracekit.trace.rl import PhaseLog, Timeline, Trajectories

_BEGINNING = "<!doctype html>\n<!-- tracekit rl -->\n"
#: The kind of file that a page replaces.
RL_PAGE_FILE = Kind("a page that `tracekit rl --html` wrote", starting_with(_BEGINNING.encode()))
#: Pixels of a picture, and the most bars and lines in it.
_WIDE, _HIGH, _MOST_STEPS, _MOST_LINES = 1000, 160, 200, 600
#: Colours of phases, the longest first, in the style sheet.
_COLOURS = 7


def rl_page(report: RlReport, log: PhaseLog | Timeline, name: str) -> str:
    """The whole page."""
    title = plain(short(name))
    phases, losses, prices = tables(report)
    rows = "".join(f"<dt>{plain(about)}</dt><dd>{plain(words)}</dd>" for about, words in answer_rows(report))
    tone = "unsure" if report.flagged else "good" if report.leading is None else "bad"
    requests = "" if isinstance(log, PhaseLog) or log.trajectories is None else _requests(log.trajectories)
    return (
        f'{_BEGINNING}<html lang="en" class="tracekit">{head(title)}<body><main>'
        f"<header><h1><bdi>{title}</bdi></h1><p>{plain(sizes(report))}</p></header>"
        f'<section class="card {tone}"><p class="headline">{plain(headline(report))}</p><dl>{rows}</dl></section>'
        f"{sections([prices])}{_phases(report, log)}{requests}{sections([phases, losses])}"
        "<footer>Made by tracekit.</footer></main></body></html>\n"
    )


def _seconds_of(log: PhaseLog | Timeline) -> Mapping[str, Floats]:
    """Seconds of each phase in each step."""
    if isinstance(log, PhaseLog):
        return log.phases
    steps, at = np.unique(log.phases.step, return_inverse=True)
    took = log.phases.end - log.phases.start
    return {
        name: np.bincount(at[named], took[named], len(steps)).astype(np.float64)
        for name in np.unique(log.phases.name).tolist()
        for named in [log.phases.name == name]
    }


def _phases(report: RlReport, log: PhaseLog | Timeline) -> str:
    """A bar a step, of its phases."""
    took = _seconds_of(log)
    names = [one.phase for one in report.phases if one.phase in took]
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


def _requests(all_steps: Trajectories) -> str:
    """The trajectories of the step with the longest generation: a line each, by engine and start."""
    steps, at = np.unique(all_steps.step, return_inverse=True)
    first, last = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(first, at, all_steps.submit)
    np.maximum.at(last, at, all_steps.end)
    longest = int((last - first).argmax())
    mine = np.flatnonzero(at == longest)
    tail = np.percentile(all_steps.tokens[mine], TAIL, method="higher")
    mine = mine[np.lexsort((all_steps.start[mine], all_steps.engine[mine]))]
    chosen = mine[np.unique(np.linspace(0, len(mine) - 1, min(len(mine), _MOST_LINES)).astype(int))]
    high = 6 if len(chosen) < 100 else 2
    scale = _WIDE / max(float(last[longest] - first[longest]), 1e-12)

    def lines() -> Iterator[str]:
        for place, one in enumerate(chosen.tolist()):
            submit, start, end = (float(column[one]) for column in (all_steps.submit, all_steps.start, all_steps.end))
            kind = "what5" if all_steps.tokens[one] > tail else f"what{all_steps.engine[one] % 2}"
            words = f"{plain(short(all_steps.engines[all_steps.engine[one]]))}: {all_steps.tokens[one]:,.0f} tokens"
            for colour, begin, until in (("level1", submit, start), (kind, start, end)):
                yield (
                    f'<rect class="{colour}" x="{(begin - first[longest]) * scale:.1f}" y="{place * high}"'
                    f' width="{(until - begin) * scale:.1f}" height="{high - 1}"><title>{words},'
                    f" {seconds(until - begin)}</title></rect>"
                )

    legend = (
        '<span><i class="what0"></i><i class="what1"></i>decoding, by engine</span><span><i class="what5"></i>longest'
        ' 5%</span><span><i class="level1"></i>waiting to start</span>'
    )
    return _picture(f"Trajectories of step {steps[longest]}", "".join(lines()), len(chosen) * high, legend)


def _picture(title: str, marks: str, high: int, legend: str) -> str:
    return (
        f'<section><h2>{title}</h2><div class="scroll"><svg role="img" aria-label="{title}" viewBox="0 0 {_WIDE}'
        f' {high}" width="{_WIDE}" height="{high}">{marks}</svg></div><p class="legend">{legend}</p></section>'
    )
