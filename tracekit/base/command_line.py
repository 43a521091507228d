"""Commands that tracekit suggests, as a shell takes them.

In: words. Out: one line that does as printed, in the same folder.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from tracekit.base.object_storage import shown
from tracekit.base.text import printable


def command(*words: str | Path) -> str:
    """`tracekit` with these words. Words in capitals stand for what only the user knows."""
    return f"tracekit {quoted(*words)}"


def adding(store: str | Path) -> str:
    """The command that adds a job to a store."""
    return command("import", "TRACE", "--store", store)


def quoted(*words: str | Path) -> str:
    """Words of a command line. A path never looks like an option."""
    texts = [shown(word) if isinstance(word, Path) else word for word in words]
    return " ".join(
        shlex.quote(printable(f"./{text}" if isinstance(word, Path) and text.startswith("-") else text))
        for word, text in zip(words, texts, strict=True)
    )
