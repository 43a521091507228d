"""Renderers of other distributions: a report as text in a form of their own, for `tracekit whatif --as NAME`.

In: the name of an entry point `tracekit.renderers`. Out: a function from a report to text.
"""

from __future__ import annotations

from collections.abc import Callable

from tracekit.base.errors import OutputError, SelectionError
from tracekit.base.plug_ins import plug_ins, tell
from tracekit.base.text import encodable

#: The forms for which tracekit has options.
OWN = frozenset({"csv", "html", "json", "markdown", "parquet", "terminal"})


def renderer(name: str) -> Callable[[object], str]:
    """The renderer of that name, whose failures raise OutputError. Raises SelectionError if there is none."""
    renderers, problems = plug_ins("renderers", OWN)
    if name not in renderers:
        installed = ", ".join(renderers) or "none, as no plug-in brings one (docs/extending.md)"
        raise SelectionError("; ".join((f"--as: renderer {name!r:.40} is unknown; known: {installed}", *problems)))
    tell(problems)
    plug_in = renderers[name]

    def render(report: object) -> str:
        with plug_in.guarded(OutputError):
            text = plug_in.value(report)
            if not isinstance(text, str):
                raise TypeError(f"it returned a {type(text).__name__}; expected a str")
            return encodable(text)

    return render
