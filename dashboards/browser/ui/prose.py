"""The texts of a page as people read them: what stands between backticks as code, `->` as an arrow.

In: components whose text comes from reports, findings and errors. Out: the same components. Reports keep plain text,
which terminals and messages show as it is.
"""

from __future__ import annotations

import re
from typing import Any

from dash import html
from dash.development.base_component import Component

_CODE = re.compile(r"`([^`]+)`")


def as_prose(content: Any) -> Any:
    """`content` and all components in it, changed in place; text with code becomes a list of parts."""
    match content:
        case html.Code() | html.Pre():
            return content
        case Component():
            if (children := getattr(content, "children", None)) is not None:
                content.children = as_prose(children)
            return content
        case list() | tuple():
            return [part for one in content for part in _several(one)]
        case str():
            return _parts(content)
        case _:
            return content


def _several(content: Any) -> list[Any]:
    prose = as_prose(content)
    return prose if isinstance(content, str) and isinstance(prose, list) else [prose]


def _parts(text: str) -> Any:
    parts = _CODE.split(text)  # text and code in turn
    prose = [html.Code(part) if number % 2 else part.replace(" -> ", " \u2192 ") for number, part in enumerate(parts)]
    return prose[0] if len(prose) == 1 else [part for part in prose if part]
