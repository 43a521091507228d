"""Reports on hangs in a store: beside its jobs, for a job that hangs in its first step has no trace.

    STORE/hangs/<time>-<number>.json      one report: the job's name, when it was found, its text and its JSON

Each file is written once and whole, so it needs no place in the catalogue.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tracekit.atomic_write import Kind, starting_with, write_text
from tracekit.errors import StoreError
from tracekit.text import printable

HANGS = "hangs"
_KIND = Kind("a report on a hang", starting_with(b'{"format": "tracekit-hang"'))


@dataclass(frozen=True, slots=True)
class StoredHang:
    """`job`: its name; there need be no such job in the store. `found_at`: seconds since the epoch. `lines`: the report
    as a terminal shows it; `report`: as docs/hang.md says.
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


def read_hangs(folder: Path, job: str | None = None) -> Iterator[StoredHang]:
    """The reports in the store in `folder`, those of one job or of all, newest first. Raises StoreError."""
    for path in sorted((folder / HANGS).glob("*.json"), reverse=True):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            del content["format"]
            found = StoredHang(**{**content, "lines": tuple(content["lines"])})
        except FileNotFoundError:  # removed since
            continue
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreError(f"{path}: no report on a hang ({printable(str(error))}); remove it") from None
        if job is None or found.job == job:
            yield found
