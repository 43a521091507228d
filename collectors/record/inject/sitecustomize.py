"""Starts tracekit's recorder, then leaves: the process goes on as if this folder were not on its path."""

import os
import sys

try:
    import _tracekit_recorder  # type: ignore[import-not-found]

    _tracekit_recorder.arm()
except Exception:  # noqa: S110  nothing of tracekit's may harm the job
    pass

_own_folder = os.path.dirname(__file__)  # noqa: PTH120  light: every Python of the job runs this
sys.path[:] = [path for path in sys.path if path != _own_folder]
sys.path_importer_cache.pop(_own_folder, None)
del sys.modules["sitecustomize"]
__import__("sitecustomize")  # the one that this file shadows; Python expects the error if there is none
