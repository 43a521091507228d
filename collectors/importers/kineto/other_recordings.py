"""Recognise other recordings, of torch and of GPUs, that are mistaken for a trace.

In: a look at a path, or the first bytes of a file. Out: what it is and what to do instead, None for anything else.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from tracekit.base.command_line import quoted
from tracekit.base.look import Look, unpacked
from tracekit.base.searches import files_below
from tracekit.base.text import listed
from tracekit.collectors.importers.kineto.sniff import SQLITE

_PICKLE = b"\x80"
#: Keys of a memory snapshot, at its beginning.
_SNAPSHOT = (b"segments", b"device_traces")
_SNAPSHOT_IS = (
    "a memory snapshot of torch.cuda.memory, which shows what uses memory, not what takes time; record a trace with"
    " torch.profiler.profile, or open the snapshot at pytorch.org/memory_viz"
)
_GRAPH_IS = (
    "an execution trace of torch.profiler.ExecutionTraceObserver, which has no GPU times; give the trace that"
    " export_chrome_trace writes"
)
_EXPORT = "nsys export --type sqlite"
_SQLITE_IS = f"a SQLite file, but not an export of Nsight Systems, or a packed one; give what `{_EXPORT} REPORT` wrote"
_ASKS_FOR_JSON = "which is not read; record with torch.profiler and give the JSON that its export_chrome_trace writes"
#: Endings of files that their first bytes do not tell -> what they are.
_ENDINGS = {
    ".nsys-rep": f"a report of Nsight Systems; convert it: `{_EXPORT} {{}}`",
    ".qdrep": f"a report of Nsight Systems; convert it: `{_EXPORT} {{}}`",
    ".sqlite": f"not a SQLite file, which an export of Nsight Systems is; copy it again, or `{_EXPORT} REPORT`",
    ".xplane.pb": f"a trace of XLA's profiler, {_ASKS_FOR_JSON}",
    ".et": f"an execution trace of Chakra, {_ASKS_FOR_JSON}",
}
#: What follows the name of an accelerator.
ACCELERATOR_IS = (
    "an accelerator that tracekit does not know: record on CUDA or ROCm GPUs, or write its ops as an op trace"
    " (docs/traces.md)"
)
#: Words of accelerators that are no GPUs, in names and categories of events, looked for in so many bytes.
_ACCELERATORS = {
    "Ascend NPUs": rb'"Ascend Hardware"|"name"\s*:\s*"CANN"|"labels"\s*:\s*"NPU"',
    "MTIA": rb'"cat"\s*:\s*"mtia_',
    "HPU (Habana)": rb'"cat"\s*:\s*"hpu_|"(?:name|labels)"\s*:\s*"(?:HPU|Habana|Gaudi)\b',
    "AIU (Spyre)": rb'"(?:cat|name|labels)"\s*:\s*"[^"]{0,40}\b(?:AIU|Spyre|sendnn)',
    "XLA devices (TPU)": rb'"name"\s*:\s*"(?:/device:TPU|XLA Ops|XLA Modules|TPU )',
    "Neuron devices": rb'"(?:name|labels)"\s*:\s*"(?:Neuron|NC)[ _]?(?:Core|Device|\d)',
    "PRIVATEUSE1": rb'"cat"\s*:\s*"privateuse1_',
}
_ACCELERATOR = re.compile(b"|".join(b"(%s)" % words for words in _ACCELERATORS.values()), re.IGNORECASE)
#: Categories of events of torch.profiler on a machine without accelerators.
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{1,60})"')
_OF_HOSTS = frozenset(
    b"cpu_op user_annotation python_function cpu_instant_event overhead Trace ac2g async_cpu_to_gpu fwdbwd Operator"
    b" forward_backward cuda_runtime cuda_driver cuda_sync cuda_profiler_range Runtime Kernel".split()
)
_LOOKED_AT = 64 << 20
#: Most files of a folder to inspect.
_MOST_FILES = 1000


def other_recording(look: Look) -> str | None:
    """Return what a file, or a file in a folder, is instead of a trace; None if unknown or unreadable."""
    if not look.is_folder:
        return what_it_is(look.text) or _by_name(look.path)
    for file in map(Look, itertools.islice(files_below(look.path), _MOST_FILES)):
        if kind := what_it_is(file.text) or _by_name(file.path):
            return f"{file.name} is {kind}"
    return None


def what_it_is(head: bytes) -> str | None:
    """Return the kind of recording, other than a trace, that begins with these unpacked bytes; None if unknown."""
    start = head.lstrip()[:4096]
    if start.startswith(_PICKLE) and any(key in start for key in _SNAPSHOT):
        return _SNAPSHOT_IS
    if start.startswith(b"{") and any(b'"' + key + b'"' in start for key in _SNAPSHOT):
        return _SNAPSHOT_IS
    if head.startswith(SQLITE):
        return _SQLITE_IS
    if start.startswith(b"{") and b'"schema"' in start and b'"nodes"' in start:
        return _GRAPH_IS
    if start.startswith(b"[") and (match := _ACCELERATOR.search(head)) is not None and match.lastindex is not None:
        return f"a trace of {list(_ACCELERATORS)[match.lastindex - 1]}, {ACCELERATOR_IS}"
    return None


def other_accelerator(file: Path, *, of_torch: bool) -> str | None:
    """Return the accelerators whose events a trace without GPU ops holds, such as "MTIA"; None for none. `of_torch`: it
    has events of torch, so that categories which torch does not have are those of an accelerator.
    """
    head = unpacked(Look(file).beginning(_LOOKED_AT))
    if (match := _ACCELERATOR.search(head)) is not None and match.lastindex is not None:
        return list(_ACCELERATORS)[match.lastindex - 1]
    if not of_torch:
        return None
    unknown = sorted(set(_CATEGORY.findall(head)) - _OF_HOSTS)
    return f"the categories {listed([name.decode(errors='replace') for name in unknown], 4)}" if unknown else None


def _by_name(file: Path) -> str | None:
    return next((what.format(quoted(file)) for end, what in _ENDINGS.items() if file.name.endswith(end)), None)
