"""Every way a trace gets in: live hooks in a training job and importers of files other tools wrote.

`span`, `step`, `set_step` and `log` are the only names a training script may want; importing them costs nothing else,
and the importers do without them.
"""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .record.spans import log, set_step, span, step

__all__ = ["log", "set_step", "span", "step"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Under `tracekit collect`, a recorder runs under another name, and only its own functions reach it.
    recorder = sys.modules.get("_tracekit_recorder")
    if recorder is not None:
        with suppress(Exception):  # it cannot be loaded, and has said so
            return getattr(recorder.load("collectors.record.spans"), name)
    from .record import spans

    return getattr(spans, name)
