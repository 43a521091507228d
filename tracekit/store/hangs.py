"""Reports on hangs in a store: stored next to its jobs, because a job that hangs in its first step has no trace.

STORE/hangs/<time>-<number>.json      one report: the job's name, when it was found, its text and its JSON

Each file is written once and atomically, so it needs no entry in the catalogue. They are read as data of others.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tracekit.base.contained import Contained
from tracekit.base.errors import StoreError, UnreadableFileError
from tracekit.base.stderr import say_once
from tracekit.base.text import LAST_MOMENT, MOST_CONFIDENT, printable, ranks_text
from tracekit.report.answer import CauseInWords
from tracekit.store.incidents import HANG

HANGS = "hangs"
_SUFFIX = ".json"


class _StoredPlace(msgspec.Struct, rename={"stall_class": "class", "waits_for": "for"}):
    """The types of what docs/hang.md says about a rank or several, where they are given."""

    rank: int | None = None
    ranks: tuple[int, ...] = ()
    host: str | None = None
    group: str | None = None
    stall_class: str | None = None
    operation: str | None = None
    phase: str | None = None
    since_s: float | None = None
    missing: str | None = None
    evidence: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()


class _Report(msgspec.Struct):
    """The types of what docs/hang.md says about a hang, where they are given."""

    hang: bool = False
    headline: str = ""
    first_step: str | None = None
    world_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    culprits: tuple[_StoredPlace, ...] = ()
    undecided: tuple[_StoredPlace, ...] = ()
    waiting: tuple[_StoredPlace, ...] = ()
    stacks: tuple[_StoredPlace, ...] = ()
    notes: tuple[str, ...] = ()


class StoredHang(msgspec.Struct, frozen=True, tag_field="format", tag="tracekit-hang"):
    """`job`: its name; the store need not have such a job. `found_at`: seconds since the epoch. `lines`: the report as
    a terminal shows it; `report`: as described in docs/hang.md.
    """

    job: str
    found_at: Annotated[float, msgspec.Meta(ge=0, le=LAST_MOMENT)]
    lines: tuple[str, ...]
    report: dict[str, Any]


def write_hang(folder: Path, job: str, lines: Sequence[str], report: dict[str, Any]) -> None:
    """Add a report to the store in `folder`. Raises OSError, UnsafeFileError."""
    now, contained = datetime.now(UTC), Contained(folder)
    stored = StoredHang(job, now.timestamp(), tuple(lines), report)
    name = f"{HANGS}/{now:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(4)}{_SUFFIX}"
    contained.make_folder(HANGS, lasting=True)
    contained.put(name, json.dumps(msgspec.to_builtins(stored)).encode() + b"\n")
    contained.sync_folder(HANGS)


def read_hangs(folder: Path, job: str | None) -> tuple[StoredHang, ...]:
    """The reports in the store in `folder`, those of one job or of all, newest first; what is none is named on stderr.
    Raises UnsafeFileError if their folder is something else.
    """
    reports, names = list[StoredHang](), hang_files(folder)
    for line in Contained(folder).unsafe(HANGS):
        say_once(f"left out: {line}")
    for name in reversed(names):
        try:
            reports.append(read_hang(folder, name))
        except FileNotFoundError:  # removed since
            continue
        except StoreError as error:
            say_once(f"left out: {error}")
    return tuple(report for report in reports if job in (None, report.job))


def hang_files(folder: Path) -> list[str]:
    """The names below the store in `folder` of the files of the reports, oldest first. Raises UnsafeFileError."""
    return [f"{HANGS}/{name}" for name in Contained(folder).files(HANGS) if name.endswith(_SUFFIX)]


def read_hang(folder: Path, name: str) -> StoredHang:
    """One report. Raises StoreError if it is not one, FileNotFoundError if it is gone."""
    try:
        stored = msgspec.convert(json.loads(Contained(folder).read(name)), StoredHang)
        msgspec.convert(stored.report, _Report)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = error.strerror or error
        raise UnreadableFileError(printable(f"{folder / name}: cannot be read: {why}; check the path")) from None
    except (ValueError, RecursionError) as error:
        raise StoreError(printable(f"{folder / name}: not a report on a hang ({error}); remove it")) from None
    return stored


def sighting_of_hang(report: Mapping[str, Any]) -> CauseInWords:
    """The account of a hang for an incident, in the words of its report (docs/hang.md), as far as it has them.

    The whole job is stuck.
    """
    headline, culprits = str(report.get("headline", "the job hangs")), report.get("culprits", ())
    hosts = dict.fromkeys(str(one["host"]) for one in culprits if one.get("host"))
    ranks = tuple(int(one["rank"]) for one in culprits)
    evidence = [str(line) for one in culprits for line in one.get("evidence", ())]
    on = f" on {', '.join(hosts)}" if hosts else ""
    return CauseInWords(
        kind=HANG,
        part=HANG,
        what=headline,
        who=f"{ranks_text(ranks)}{on}" if ranks else "nobody can be told yet",
        why=evidence[0] if evidence else headline,
        check=str(report.get("first_step", "")),
        fix=None,
        ranks=ranks,
        hosts=tuple(hosts),
        gpu_uuids=(),
        cost_s=0.0,
        share=1.0,
        confidence=MOST_CONFIDENT,
        first_step=None,
        saved_gpu_hours_per_day=None,
    )
