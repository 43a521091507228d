"""Shared handling of page callbacks: check their arguments and show errors on the page.

In: the functions that Dash calls with values from a browser, which are untrusted. Out: an answer, a message on the
page, or a 400 with one line in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar, get_type_hints

import flask
import msgspec
from dash import callback, html, set_props
from dash.development.base_component import Component
from werkzeug.exceptions import BadRequest, HTTPException

from tracekit.dashboards.browser.ui.components import attributes, told
from tracekit.dashboards.browser.ui.prose import as_prose

#: Id of the element that shows errors of callbacks without a better place for them.
TROUBLE = "page-trouble"

#: Pages send a few kilobytes; what a callback may cost grows with them.
MOST_BYTES = 1 << 17

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def answers(
    *wiring: Any, on_error: Callable[[Exception], Any] | None = None
) -> Callable[[Callable[_Arguments, _Answer]], Callable[_Arguments, _Answer]]:
    """`dash.callback` for the pages: check values against the annotations and show errors on the page.

    `wiring`: outputs, inputs and states. `on_error`: returns the outputs after an error, if they have a place for it.
    """

    def register(function: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
        wired = callback(*wiring, prevent_initial_call=True, on_error=failed)
        registered: Callable[_Arguments, _Answer] = wired(checked(function))
        return registered

    def failed(error: Exception) -> Any:
        if isinstance(error, HTTPException):  # the answer is a status, not a page
            raise error
        return (on_error or say_failure)(error)

    return register


def checked(function: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
    """Wrap the callback to raise BadRequest for values that do not fit its annotations, which no page sends."""
    expected, hints = signature(function), get_type_hints(function)

    @wraps(function)
    def safely(*values: _Arguments.args, **named: _Arguments.kwargs) -> _Answer:
        try:
            given = expected.bind(*values, **named).arguments
        except TypeError as error:
            raise BadRequest(f"{function.__name__}: {error}") from None
        if flask.request.content_length is None or flask.request.content_length > MOST_BYTES:
            raise BadRequest(f"{function.__name__}: more than {MOST_BYTES:,} bytes")
        for name, value in given.items():
            several = expected.parameters[name].kind is Parameter.VAR_POSITIONAL
            if not all(_fits(each, hints[name]) for each in (value if several else [value])):
                raise BadRequest(f"{function.__name__}: {name} = {value!r:.60} is not {hints[name]}")
        return _in_prose(function(*values, **named))

    return safely


def _in_prose(answer: _Answer) -> _Answer:
    """The outputs of a callback, with the texts of components as people read them."""
    for output in answer if isinstance(answer, list | tuple) else (answer,):
        if isinstance(output, Component):
            as_prose(output)
        elif isinstance(output, list):
            _in_prose(output)
    return answer


def _fits(value: Any, kind: Any) -> bool:
    """True if a value from JSON is of that type; a TypedDict needs at least its keys."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def say_failure(error: Exception) -> None:
    """Show a message over the page and leave the rest of it unchanged."""
    message = as_prose(told(error))
    message.children = [*message.children, html.Button("Close", **attributes(data_close=TROUBLE))]
    set_props(TROUBLE, {"children": message})
