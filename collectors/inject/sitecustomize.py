"""Starts tracekit's recorder, then runs the `sitecustomize` that this file shadows."""

import importlib.machinery
import importlib.util
import os
import sys

try:
    import tracekit_collect_hook  # type: ignore[import-not-found]

    tracekit_collect_hook.arm()
except Exception:  # noqa: S110  nothing of tracekit's may harm the job
    pass

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  light: every Python of the job runs this
_elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != _here]  # noqa: PTH100
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _elsewhere)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
