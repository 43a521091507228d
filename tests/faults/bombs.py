"""Files that are small, or take no space, and claim to be huge: each is opened with little memory and time.

`python -m tests.faults.bombs FOLDER` prints, as JSON, how each ended: exit code, stderr, MB and seconds of a processor.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl

from tests.faults.forks import forked, sure
from tests.faults.sweep import Place, base, command, warm_up
from tests.handmade import slow_frame, slow_trace, write_canonical

#: What each may take beyond what the process had, and its processor time.
MOST_BYTES, MOST_S = 1 << 30, 60
HUGE = 100 << 30
Arguments = tuple[str | Path, ...]


def sparse(path: Path, beginning: bytes = b"") -> Path:
    """A file of 100 GB that takes a block of the disk."""
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(HUGE)
    return path


def zipped(path: Path, beginning: bytes, repeated: bytes, gigabytes: int = 8) -> Path:
    """A gzip file of that many GB."""
    part = gzip.compress(repeated * ((1 << 24) // len(repeated)))
    path.write_bytes(gzip.compress(beginning) + part * (64 * gigabytes))
    return path


def folder_with(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    return path


def huge_file(name: str, beginning: bytes = b"") -> Callable[[Path], Arguments]:
    return lambda folder: ("store", "list", sparse(folder / name, beginning))


def store_with(name: str, *arguments: str, beginning: bytes = b"") -> Callable[[Path], Arguments]:
    """A command on a store in which one file is huge."""

    def make(folder: Path) -> Arguments:
        store = folder / "jobs.store"
        shutil.copytree(folder.parent / "start" / "jobs.store", store)
        (store / name).parent.mkdir(exist_ok=True)
        sparse(store / name, beginning)
        return tuple(store if word == "STORE" else word for word in arguments)

    return make


def long_texts(folder: Path) -> Arguments:
    """64 ops of one kind, whose name has 4 MB."""
    ops = slow_frame()[:1].cast({"kind": pl.String}).with_columns(kind=pl.lit("x" * (4 << 20)))
    return "store", "list", write_canonical(folder / "x.parquet", pl.concat([ops] * 64))


def lists(folder: Path) -> Arguments:
    """An op with a list of 50 million zeros where its step belongs."""
    step = pl.select(step=pl.zeros(50_000_000, dtype=pl.Int32).implode())
    return "store", "list", write_canonical(folder / "x.parquet", slow_frame()[:1].drop("step").hstack(step))


def sizes(folder: Path) -> Arguments:
    slow_trace().write_parquet(folder / "x.parquet")
    return "store", "list", folder / "x.parquet", "--layout", sparse(folder / "x.yaml", b"dp_size: 2\n")


def dumps(folder: Path) -> Arguments:
    sparse(folder_with(folder / "dumps" / "nccl_trace_rank_0"), b"\x80\x02}")
    return "hang", folder / "dumps"


def profile(beginning: bytes, repeated: bytes) -> Callable[[Path], Arguments]:
    return lambda folder: (
        "store",
        "list",
        zipped(folder_with(folder / "profile" / "rank0.pt.trace.json.gz"), beginning, repeated),
    )


EVENT = b'{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1, "dur": 1, "args": {"stream": 7}},'
HANG = "hangs/20990101-000000-000000-aaaaaaaa.json"
BOMBS: dict[str, Callable[[Path], Arguments]] = {
    "Parquet": huge_file("x.parquet", b"PAR1"),
    "JSON lines": huge_file("x.jsonl", b'{"step": 1'),
    "NDTimeline": huge_file("timeline_run0_raw.log", b"{"),
    "SQLite": huge_file("x.sqlite", b"SQLite format 3\0"),
    "sizes": sizes,
    "dump": dumps,
    "long texts": long_texts,
    "long lists": lists,
    "gzip of spaces": profile(b'{"schemaVersion": 1, "traceEvents": [', b" "),
    "gzip of events": profile(b'{"schemaVersion": 1, "traceEvents": [', EVENT),
    "gzip of brackets": profile(b'{"schemaVersion": 1, "traceEvents": [', b"["),
    "gzip of a text": profile(b'{"schemaVersion": 1, "traceEvents": [{"name": "', b"x"),
    "hang": store_with(HANG, "hang", "STORE", beginning=b'{"format": "tracekit-hang"'),
    "hang, checked": store_with(HANG, "store", "check", "STORE"),
    "changes": store_with("handled/1", "store", "incidents", "--store", "STORE", beginning=b"{}\n"),
    "next change": store_with("handled/1", "store", "handle", "1", "--store", "STORE", "--note", "x"),
    "note": store_with("unfinished", "store", "prune", "STORE", "--max-size", "1G", beginning=b"1 1\n"),
    "note, checked": store_with("unfinished", "store", "check", "STORE", beginning=b"1 1\n"),
    "catalogue": store_with("catalog.duckdb", "store", "list", "--store", "STORE", beginning=bytes(8) + b"DUCK"),
    "report, checked": store_with("jobs/1/0.report.json", "store", "check", "STORE"),
    "stray file, checked": store_with("jobs/1/99.parquet", "store", "check", "STORE"),
    "mark": store_with("tracekit-store", "store", "list", "--store", "STORE"),
}


def high_water() -> int:
    """The most memory that this process has held, MB."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return 0 if found is None else int(found[1]) // 1024


def open_with_little(make: Callable[[Path], Arguments], folder: Path) -> dict[str, object]:
    """How a command ends that opens a bomb."""
    folder.mkdir()
    said, spent = folder / "said", folder / "spent"
    arguments = sure(lambda: make(folder))

    def run() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget what the process held
        before = high_water()
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, -1))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
        try:
            command(*arguments)
        finally:
            spent.write_text(f"{high_water() - before} {sum(os.times()[:2])}")

    code, _ = forked(run, said)
    megabytes, seconds = map(float, spent.read_text().split()) if spent.exists() else (0, 0)
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    return {"code": code, "said": said.read_text(), "file": largest.name, "MB": megabytes, "s": seconds}


def main(folder: Path, chosen: list[str]) -> None:
    """Print how each ended."""
    warm_up(folder)
    sure(lambda: base(Place(folder / "start")))
    for name, make in BOMBS.items():
        if not chosen or name in chosen:
            place = folder / name.replace(" ", "-").replace("'", "")
            print(json.dumps({"bomb": name, **open_with_little(make, place)}), flush=True)
            shutil.rmtree(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
