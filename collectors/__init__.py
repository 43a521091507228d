"""Every way a trace gets in: live hooks in a training job and importers of files other tools wrote.

`span` and `set_step` are the only names a training script may want; importing them costs nothing else.
"""

from tracekit.collectors.runtime.spans import set_step, span

__all__ = ["set_step", "span"]
