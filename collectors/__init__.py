"""Every way a trace gets in: live hooks in a training job and importers of files other tools wrote.

`span`, `step` and `set_step` are the only names a training script may want; importing them costs nothing else.
"""

from tracekit.collectors.runtime.spans import set_step, span, step

__all__ = ["set_step", "span", "step"]
