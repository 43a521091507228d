"""Pictures of a run of post-training for its page: phases over steps, requests of the longest generation.

In: an `RlPicture`. Out: HTML. Names are escaped wherever they appear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tracekit.base.text import seconds, short
from tracekit.dashboards.documents.card import plain
from tracekit.report.pictures import RequestBar, RlPicture

#: Pixels of a picture.
_WIDE, _HIGH = 1000, 160
#: Colours of phases, the longest first, in the style sheet.
_COLOURS = 7


def pictures(picture: RlPicture) -> str:
    """The phases and, if there are any, the requests."""
    requests = "" if picture.requests is None else _requests(picture.requests, picture.window_s)
    return (_phases(picture) if picture.phases else "") + requests


def _phases(picture: RlPicture) -> str:
    """A bar a step, of its phases."""
    drawn = len(picture.phases[0].seconds)
    scale = _HIGH / max(picture.longest_s, 1e-12)
    width, marks = _WIDE / drawn, []
    for place in range(drawn):
        top = float(_HIGH)
        for number, phase in enumerate(picture.phases):
            value = phase.seconds[place]
            top -= value * scale
            marks.append(
                f'<rect class="what{number % _COLOURS}" x="{place * width:.1f}" y="{top:.1f}" width="{width * 0.9:.1f}"'
                f' height="{value * scale:.1f}"><title>{plain(phase.phase)}: {seconds(value)}</title></rect>'
            )
    legend = "".join(
        f'<span><i class="what{number % _COLOURS}"></i>{plain(phase.phase)}</span>'
        for number, phase in enumerate(picture.phases)
    )
    few = f" {drawn} of {picture.steps} steps." if drawn < picture.steps else ""
    return _picture("Phases over steps", "".join(marks), _HIGH, f"{legend}{few}")


def _requests(requests: Sequence[RequestBar], window_s: float) -> str:
    """The requests of the longest generation: a line each, by engine and start."""
    high = 6 if len(requests) < 100 else 2
    scale = _WIDE / max(window_s, 1e-12)

    def lines() -> Iterator[str]:
        for place, request in enumerate(requests):
            kind = "what5" if request.long else f"what{request.engine % 2}"
            words = f"{plain(short(request.engine_name))}: {request.tokens:,.0f} tokens"
            for colour, begin, until in (
                ("level1", request.submit_s, request.start_s),
                (kind, request.start_s, request.end_s),
            ):
                yield (
                    f'<rect class="{colour}" x="{begin * scale:.1f}" y="{place * high}"'
                    f' width="{(until - begin) * scale:.1f}" height="{high - 1}"><title>{words},'
                    f" {seconds(until - begin)}</title></rect>"
                )

    legend = (
        '<span><i class="what0"></i><i class="what1"></i>decoding, by engine</span><span><i class="what5"></i>longest'
        ' 5%</span><span><i class="level1"></i>waiting to start</span>'
    )
    return _picture("Requests of the longest generation", "".join(lines()), len(requests) * high, legend)


def _picture(title: str, marks: str, high: int, legend: str) -> str:
    return (
        f'<section><h2>{title}</h2><div class="scroll"><svg role="img" aria-label="{title}" viewBox="0 0 {_WIDE}'
        f' {high}" width="{_WIDE}" height="{high}">{marks}</svg></div><p class="legend">{legend}</p></section>'
    )
