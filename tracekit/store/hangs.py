"""Reports on hangs, as a store keeps them.

    STORE/hangs/<time>-<number>.json   one report: the job's name, when it was found, its text and its JSON

They are stored next to the jobs, because a job that hangs in its first step has no trace. They are read as data of
others: a damaged one is named and left out.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from tracekit.analysis.hang.hang_report import HangReport
from tracekit.base.contained import Contained
from tracekit.base.errors import StoreError, UnreadableFileError
from tracekit.base.stderr import say_once
from tracekit.base.text import LAST_MOMENT, MOST_CONFIDENT, printable, ranks_text
from tracekit.report.conclusions import CauseInWords
from tracekit.store.incidents import HANG, HANGS

_SUFFIX = ".json"


class StoredHang(msgspec.Struct, frozen=True, tag_field="format", tag="tracekit-hang"):
    """`job`: its name; the store need not have such a job. `found_at`: seconds since the epoch. `lines`: the report as
    a terminal shows it.
    """

    job: str
    found_at: Annotated[float, msgspec.Meta(ge=0, le=LAST_MOMENT)]
    lines: tuple[str, ...]
    report: HangReport


def write_hang(folder: Path, job: str, lines: Sequence[str], report: HangReport) -> None:
    """Add a report to the store in `folder`. Raises OSError, UnsafeFileError.

    Each file is written once and atomically, so it needs no entry in the catalogue.
    """
    created_at, contained = datetime.now(UTC), Contained(folder)
    stored = StoredHang(job, created_at.timestamp(), tuple(lines), report)
    name = f"{HANGS}/{created_at:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(4)}{_SUFFIX}"
    contained.make_folder(HANGS, durable=True)
    contained.put(name, json.dumps(msgspec.to_builtins(stored)).encode() + b"\n")
    contained.sync_folder(HANGS)


def read_hangs(folder: Path, job: str | None) -> tuple[StoredHang, ...]:
    """The reports in the store in `folder`, of one job or of all, newest first; names other files on stderr. Raises
    UnsafeFileError if their folder is something else.
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
        return msgspec.convert(json.loads(Contained(folder).read(name)), StoredHang)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = error.strerror or error
        raise UnreadableFileError(printable(f"{folder / name}: cannot be read: {why}; check the path")) from None
    except (ValueError, RecursionError) as error:
        why = f"not a report on a hang as this tracekit writes it ({error}); read it with a newer one, or remove it"
        raise StoreError(printable(f"{folder / name}: {why}")) from None


def sighting_of_hang(report: HangReport) -> CauseInWords:
    """The account of a hang for an incident: the whole job is stuck."""
    hosts = dict.fromkeys(culprit.host for culprit in report.culprits if culprit.host)
    ranks = tuple(culprit.rank for culprit in report.culprits)
    evidence = [line for culprit in report.culprits for line in culprit.evidence]
    on = f" on {', '.join(hosts)}" if hosts else ""
    return CauseInWords(
        kind=HANG,
        part=HANG,
        what=report.headline,
        who=f"{ranks_text(ranks)}{on}" if ranks else "nobody can be told yet",
        why=evidence[0] if evidence else report.headline,
        check=report.first_step or "",
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
