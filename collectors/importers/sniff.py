"""Recognise recordings of other tools by their first bytes, and by the names of their files.

In: a look at a path. Out: whether it is of that format. The readers of the formats are imported only once one of them
has been recognised.
"""

from __future__ import annotations

import re
from itertools import islice

from tracekit.base.look import Look

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
