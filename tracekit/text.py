"""Text from outside made fit to be shown or stored: job names, host names, paths.

In: any string. Out: one that cannot break a line, steer a terminal or fail to encode.
"""

from __future__ import annotations

#: A name longer than this is cut where it is shown.
LONGEST_NAME = 80


def encodable(text: str) -> str:
    """`text` with what UTF-8 cannot hold (undecodable bytes of a path, lone surrogates) as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    """`text` on one line, with control characters and what UTF-8 cannot hold as escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in encodable(text))


def short(text: str) -> str:
    """`printable`, cut to LONGEST_NAME characters."""
    shown = printable(text)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 3]}..."
