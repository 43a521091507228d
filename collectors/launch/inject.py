"""Writes the folder that makes training processes start recording, through PYTHONPATH.

Two ways in, because each can be switched off: `sitecustomize`, run by every Python at start, and an entry point that
torch runs at the end of its import. Both end in `runtime.bootstrap.arm`, which is idempotent.
"""

from __future__ import annotations

from pathlib import Path

from tracekit.atomic_write import Kind, starting_with, write_text

SITECUSTOMIZE = '''"""Arms tracekit's recorder, then runs the sitecustomize this file shadows."""

import importlib.machinery
import importlib.util
import os
import sys

try:
    from tracekit.collectors.runtime.bootstrap import arm
except ImportError as error:
    sys.stderr.write(f"tracekit: {sys.executable} cannot import tracekit ({error}); this process is not recorded\\n")
else:
    arm()

_here = os.path.dirname(os.path.abspath(__file__))
_spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != _here]
)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
'''
METADATA = "Metadata-Version: 2.1\nName: tracekit-collect-hook\nVersion: 0\n"
ENTRY_POINTS = "[torch.backends]\ntracekit_collect = tracekit.collectors.runtime.bootstrap:arm\n"


def write_injection(directory: Path) -> Path:
    """Write the folder below `directory` and return it. Raises OSError, OutputError for foreign files."""
    folder = directory / "inject"
    info = folder / "tracekit_collect_hook-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    for path, text in (
        (folder / "sitecustomize.py", SITECUSTOMIZE),
        (info / "METADATA", METADATA),
        (info / "entry_points.txt", ENTRY_POINTS),
    ):
        # Launchers of several nodes share the folder: one finds what another has written.
        write_text(path, text, Kind("the file that tracekit writes there", starting_with(text.encode())))
    return folder
