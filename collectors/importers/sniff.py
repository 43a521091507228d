"""Recognise recordings of other tools by their first bytes, and by the names of their files.

In: a look at a path. Out: whether it is of that format, or what it is instead and what to do. The readers of the
formats are imported only once one of them has been recognised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from tracekit.base.limits import files_below
from tracekit.base.paths import Look, command
from tracekit.trace.model import TIMELINE_MARK

#: Names of MegaScan's files, with the position of their rank.
MEGASCAN_FILE = re.compile(r"benchmark-data-(\d{1,6})-pipeline-(\d{1,6})-tensor-(\d{1,6})\.json")
#: Words near the beginning of flight-recorder dumps, pickled or as JSON.
_DUMP_WORDS = (b"pg_config", b"entries")
#: Most files of a folder to look into for a dump.
_MOST_FILES = 16


def is_dump(look: Look) -> bool:
    """A dump of one rank's flight recorder."""
    return look.head[:1] in {b"\x80", b"{"} and all(word in look.head for word in _DUMP_WORDS)


def has_dumps(look: Look) -> bool:
    """A folder with dumps."""
    return any(map(is_dump, islice(look.files(), _MOST_FILES)))


def is_ndtimeline_log(look: Look) -> bool:
    """The raw log of NDTimeline: its first line names a metric and its raw parts."""
    head = look.text[:4096]
    return b"metric_name: " in head and b"recent_since_start_raw_parts: " in head


def is_ndtimeline_chrome(look: Look) -> bool:
    """A JSON list of complete events whose args hold rank, step, tp and pp."""
    head = look.text[:4096]
    return head.lstrip().startswith(b"[") and all(key in head for key in (b'"rank"', b'"step"', b'"tp"', b'"pp"'))


def is_megascan(look: Look) -> bool:
    """A folder with MegaScan's file of a rank, or such a file."""
    return any(MEGASCAN_FILE.fullmatch(file.name) for file in (look.entries if look.is_folder else (look,)))


def is_megascan_chrome(look: Look) -> bool:
    """A JSON list of events that have a colour and an iteration: what MegaScan's script makes of its files."""
    head = look.text[:4096]
    return head.lstrip().startswith(b"[") and b'"thread_state_' in head and b'"iteration"' in head


def is_inspector(look: Look) -> bool:
    """A file that begins with a line of the NCCL Inspector, or a folder with one."""
    if look.is_folder:
        return any(map(is_inspector, look.files((".log",))))
    head = look.text[:4096]
    return head.startswith(b"{") and b'"inspector_output_format_version"' in head and b'"header"' in head


SUFFIXES = (".json", ".json.gz", ".sqlite")
#: First bytes of a SQLite file, such as an export of Nsight Systems.
SQLITE = b"SQLite format 3\0"
#: A bare list of events, Chrome's array format, is of torch.profiler by the categories of its events.
_LIST = re.compile(
    rb'"cat"\s*:\s*"(?:cpu_op|kernel|cuda_runtime|cuda_driver|gpu_mem\w+|user_annotation|python_function|Operator|Kernel'
    rb'|Runtime|Mem\w+)"'
)
_MARKS = (b'"traceEvents"', b'"distributedInfo"', b'"deviceProperties"', b'"baseTimeNanoseconds"')


def is_gpu_trace(look: Look) -> bool:
    """Whether a file is a trace of torch.profiler or an export of Nsight Systems."""
    return is_profile(look) or is_export(look)


def is_profile(look: Look) -> bool:
    """Whether a file is a Chrome trace of torch.profiler, not one that tracekit exported."""
    head = look.text
    is_list = head.lstrip().startswith(b"[") and b'"ph"' in head and _LIST.search(head) is not None
    return (is_list or any(mark in head for mark in _MARKS)) and TIMELINE_MARK.encode() not in head


def is_export(look: Look) -> bool:
    """Whether a SQLite file has tables of Nsight Systems; True if it is damaged, so that reading reports why."""
    if not look.head.startswith(SQLITE):
        return False
    import sqlite3  # most files are no SQLite

    try:
        with closing(sqlite3.connect(f"{look.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
            return any(name == "StringIds" or name.startswith("CUPTI_") for (name,) in tables)
    except sqlite3.Error:
        return True


def traces_in(folder: Path) -> list[Path]:
    """Return the traces in a folder and below it, by name: 2.json before 10.json."""
    return sorted((path for path in _named_as_traces(folder) if is_gpu_trace(Look(path))), key=_by_number)


def empty_in(folder: Path) -> list[Path]:
    """Return the empty files in a folder and below it that are named as traces are."""
    empty = (path for path in _named_as_traces(folder) if path.is_file() and not path.stat().st_size)
    return sorted(empty, key=_by_number)


def _named_as_traces(folder: Path) -> Iterator[Path]:
    return (path for path in files_below(folder) if path.name.endswith(SUFFIXES))


def _by_number(path: Path) -> list[tuple[str, int]]:
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(path))]


#: Colours of a console. These patterns are compiled when they are first searched for: most files need none.
_COLOUR = rb"\x1b\[[0-9;]*m"
_RECORD = "record a trace with torch.profiler"
_PHASES = "which says nothing of what is within a step"
_WATCHDOG = (
    rb"Watchdog caught collective operation timeout|failure detected by watchdog|"
    rb"Received a dump signal due to a collective|Timeout at NCCL work: \d+"
)
_RAS = (
    rb"(?m)ranks? ha(?:ve|s) launched up to operation \d|Communicator ranks have different \w+ operation counts|"
    rb"^\s*Group\s+Comms\s+Nodes\s+Ranks\s+Ranks"
)
#: What is in a log -> what it is, and what to do.
_LOGS = (
    (
        rb"\biteration\s+\d+/\s*\d+\s*\|.{0,300}elapsed time per iteration",
        (
            f"a log of Megatron, {_PHASES}; {_RECORD} (Megatron: --profile --use-pytorch-profiler), or give the folder"
            " of its tracer, MegaScan"
        ),
    ),
    (
        rb"\bstep:\s*\d+\s+loss:\s*\S+.{0,300}\b(?:tps|mfu):",
        f"a log of torchtitan, {_PHASES}; {_RECORD} (torchtitan: --profiling.enable_profiling)",
    ),
    (
        rb"(?:Started|Finished): '[\w ./-]+'(?:, time cost: [\d.]+s)?",
        (
            "lines of SkyRL's timers, which do not name their step; with trainer.logger=console, SkyRL prints `Step 3:`"
            " and all timings of that step, which `tracekit rl` reads"
        ),
    ),
    (
        rb"Reward Mean: \S+.{0,300}Completion Length Mean:",
        f"a log of cosmos-rl, {_PHASES}; record phases with tracekit.rl (docs/rl.md), or {_RECORD}",
    ),
    (
        rb"\{'loss': '?[-\d.e]+.{0,2000}'(?:learning_rate|step_time)': ",
        (
            f"a log of the Hugging Face Trainer (or TRL), {_PHASES}; {_RECORD}, or record phases of TRL with"
            " tracekit.rl (docs/rl.md)"
        ),
    ),
    (rb"\[Rank \d+\] step=\d+, skipped=\d+, lr=", f"a log of DeepSpeed, {_PHASES}; {_RECORD}"),
)
#: Binary files have a zero in so many bytes; logs may have some where a node died.
_MAGIC = 64
#: What is in the first record of a file of TensorBoard's events.
_EVENTS = b"brain.Event:"
_EVENTS_ARE = (
    "scalars of TensorBoard, not a trace: they time whole steps and the loading of data at most;"
    f" {_RECORD}, or give the log of a trainer that prints its phases (docs/rl.md)"
)


def is_hang_log(look: Look) -> bool:
    """Whether a file holds what NCCL's watchdogs have printed, or a report of its RAS."""
    return is_hang_text(look.head) or is_hang_text(look.tail)


def is_hang_text(head: bytes) -> bool:
    """Whether text has messages of NCCL's watchdog, or is a report of NCCL's RAS."""
    return b"\0" not in head[:_MAGIC] and any(re.search(pattern, head) for pattern in (_WATCHDOG, _RAS))


def other_log(head: bytes, path: str | Path = "FILE") -> str | None:
    """What a file is that begins with these bytes, and what to do; None if unknown. `path`: its name, for commands."""
    if _EVENTS in head[:64]:
        return _EVENTS_ARE
    if b"\0" in head[:_MAGIC]:
        return None
    text = re.sub(_COLOUR, b"", head)
    if re.search(_RAS, text):
        return f"a report of NCCL's RAS (ncclras); type `{command('hang', path)}`"
    if re.search(_WATCHDOG, text):
        return f"messages of NCCL's watchdog about ranks of a hung job; type `{command('hang', path)}`"
    return next((what for pattern, what in _LOGS if re.search(pattern, text)), None)
