"""Every way a trace gets in: live hooks in a training job and importers of files other tools wrote.

`span`, `step`, `set_step` and `log` are the only names a training script may want; importing them costs nothing else,
and the importers do without them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.collectors.runtime.spans import log, set_step, span, step

__all__ = ["log", "set_step", "span", "step"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tracekit.collectors.runtime import spans

    return getattr(spans, name)
