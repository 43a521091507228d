"""Reports on hangs in a store: stored next to its jobs, because a job that hangs in its first step has no trace.

STORE/hangs/<time>-<number>.json      one report: the job's name, when it was found, its text and its JSON

Each file is written once and atomically, so it needs no entry in the catalogue.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tracekit.base.atomic_write import Kind, starting_with, write_text
from tracekit.base.errors import StoreError
from tracekit.base.text import MOST_CONFIDENT, printable, ranks_text
from tracekit.report.answer import Account
from tracekit.store.incidents import HANG

HANGS = "hangs"
_KIND = Kind("a report on a hang", starting_with(b'{"format": "tracekit-hang"'))


@dataclass(frozen=True, slots=True)
class StoredHang:
    """`job`: its name; the store need not have such a job. `found_at`: seconds since the epoch. `lines`: the report as
    a terminal shows it; `report`: as described in docs/hang.md.
    """

    job: str
    found_at: float
    lines: tuple[str, ...]
    report: dict[str, Any]


def write_hang(folder: Path, job: str, lines: Sequence[str], report: dict[str, Any]) -> None:
    """Add a report to the store in `folder`. Raises OSError, OutputError."""
    now = datetime.now(UTC)
    stored = StoredHang(job, now.timestamp(), tuple(lines), report)
    (folder / HANGS).mkdir(exist_ok=True)
    path = folder / HANGS / f"{now:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(4)}.json"
    write_text(path, json.dumps({"format": "tracekit-hang", **asdict(stored)}) + "\n", _KIND)


def read_hangs(folder: Path, job: str | None) -> tuple[StoredHang, ...]:
    """The reports in the store in `folder`, those of one job or of all, newest first. Raises StoreError."""
    found = []
    for path in reversed(hang_files(folder)):
        with suppress(FileNotFoundError):  # removed since
            found.append(read_hang(path))
    return tuple(one for one in found if job in (None, one.job))


def hang_files(folder: Path) -> list[Path]:
    """The files of the reports in the store in `folder`, oldest first."""
    return sorted((folder / HANGS).glob("*.json"))


def read_hang(path: Path) -> StoredHang:
    """One report. Raises StoreError if it is not one, FileNotFoundError if it is gone."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        del content["format"]
        return StoredHang(**{**content, "lines": tuple(content["lines"])})
    except FileNotFoundError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: not a report on a hang ({printable(str(error))}); remove it") from None


def sighting_of_hang(report: Mapping[str, Any]) -> Account:
    """The account of a hang for an incident, in the words of its report (docs/hang.md), as far as it has them.

    The whole job is stuck.
    """
    headline, culprits = str(report.get("headline", "the job hangs")), report.get("culprits", ())
    hosts = dict.fromkeys(str(one["host"]) for one in culprits if one.get("host"))
    ranks = tuple(int(one["rank"]) for one in culprits)
    evidence = [str(line) for one in culprits for line in one.get("evidence", ())]
    on = f" on {', '.join(hosts)}" if hosts else ""
    return Account(
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
