"""Opens logs of post-training and finds out who wrote them.

In: files. Out: a `PhaseLog` or a `RlTimeline`. Nothing in a file is executed: pickles are refused unread.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice, permutations
from pathlib import Path

from tracekit.base.errors import FormatError
from tracekit.base.look import Look
from tracekit.base.text import listed
from tracekit.collectors.importers.other_logs import other_log
from tracekit.collectors.importers.rl.console import plain, unnumbered
from tracekit.collectors.importers.rl.frameworks import FRAMEWORKS, Framework, Record, formats_of
from tracekit.collectors.importers.rl.phase_log import read_phases
from tracekit.collectors.importers.rl.trajectories import read_trajectories
from tracekit.trace.post_training import Format, PhaseLog, RlTimeline

#: Largest file that is read, bytes.
_LARGEST_FILE = 4 << 30
#: What is read of a file to recognise it, bytes: consoles print much before the first step.
_LOOKED_AT = 1 << 20
#: A pickle of protocol 2 or later, and the archive in which torch saves one.
_PICKLES = (*(bytes((0x80, protocol)) for protocol in range(2, 6)), b"PK\x03\x04")
#: Beginnings of the lines of the generic format.
_GENERIC = (b'"trajectory"', b'"phase"')


def read_rl(paths: Sequence[Path], written_by: Format | None = None) -> PhaseLog | RlTimeline:
    """Read the files of one run, in their order, of folders all `*.jsonl`; `written_by`: None to find out.

    Raises FormatError.
    """
    contents = {str(file): _content(file) for path in paths for file in _files(path)}
    formats = {written_by} if written_by else set[Format]().union(*(_formats(*one) for one in contents.items()))
    if len(formats) > 1:
        raise FormatError(f"{listed(contents)}: logs of {listed(sorted(formats))}; give the files of one run")
    (format_,) = formats
    if format_ is Format.TRAJECTORIES:
        return read_trajectories(contents)
    framework = next(one for one in FRAMEWORKS if one.format is format_)
    records = {name: _records(framework, name, content) for name, content in contents.items()}
    steps = {name: {step for step, _, _ in of_file} for name, of_file in records.items()}
    for earlier, later in permutations(steps, 2):  # a run that goes on in a new file repeats a few
        if steps[earlier] <= steps[later]:
            raise FormatError(f"{earlier} and {later} have the same steps: two runs; give the files of one")
    return read_phases(framework, chain.from_iterable(records.values()), listed(contents))


def _records(framework: Framework, name: str, content: bytes) -> list[Record]:
    try:
        records = list(framework.records(_lines(content)))
    except ValueError as error:
        raise FormatError(f"{name}, {error}") from None
    if records or framework.keys is None:
        return records
    return [(step, values, None) for step, values in enumerate(unnumbered(_lines(content), framework.keys))]


def looks_like_rl(look: Look) -> bool:
    """Whether a path is a log of post-training by its beginning, or the folder into which tracekit.rl records."""
    if look.is_folder:
        return any(map(looks_like_rl, islice(look.files((".jsonl",)), 1)))
    return bool(_formats_at(look))


def is_record_of_rl(look: Look) -> bool:
    """Whether a file is in the generic format: all such files of a folder are one run."""
    return look.path.suffix == ".jsonl" and _formats_at(look) == {Format.TRAJECTORIES}


def _formats_at(look: Look) -> set[Format]:
    if not look.head:
        return set()
    try:
        return _formats(str(look.path), look.beginning(_LOOKED_AT))
    except FormatError:
        return set()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if path.exists() and not path.is_file():
            raise FormatError(f"{path}: a pipe or a device, not a file; save what it gives to a file first")
        return [path]
    if files := sorted(path.glob("*.jsonl")):
        return files
    raise FormatError(
        f"{path}: a folder without *.jsonl; give the log, or the folder that tracekit.rl has recorded into"
    )


def _content(path: Path) -> bytes:
    """What a file holds. Raises FormatError for one that is not text."""
    try:
        with path.open("rb") as file:
            beginning = file.read(4096)
            if beginning.startswith(_PICKLES):
                raise FormatError(f"{path}: a pickle, which could run any code if it were read; give the log as text")
            if beginning.startswith(b"\x1f\x8b"):
                raise FormatError(f"{path}: compressed; unpack it first (gunzip -k)")
            if b"\0" in beginning:
                raise FormatError(f"{path}: not text; give the log that the framework printed")
            if path.stat().st_size > _LARGEST_FILE:
                raise FormatError(f"{path}: larger than {_LARGEST_FILE >> 30} GiB; give fewer steps")
            content = beginning + file.read()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}; check path and permissions") from None
    content = _whole_lines(content.removeprefix(codecs.BOM_UTF8))
    if not content or content.isspace():
        raise FormatError(f"{path}: an empty file; give the log of a run that has trained for a few steps")
    return content


def _whole_lines(content: bytes) -> bytes:
    """Without a last line of JSON that is still being written, or whose writer was killed."""
    end = content.rfind(b"\n") + 1
    if content[end : end + 1] == b"{":
        try:
            json.loads(content[end:])
        except (ValueError, RecursionError):
            return content[:end]
    return content


def _formats(path: str, content: bytes) -> set[Format]:
    """The formats of a file's lines. Raises FormatError if there are none."""
    first = content.lstrip()[:65536].split(b"\n", 1)[0]
    if first.startswith(b"{") and any(key in first for key in _GENERIC):
        return {Format.TRAJECTORIES}
    formats = formats_of(content, _lines(content))
    if not formats:
        if (log := other_log(content[:_LOOKED_AT], path)) is not None:
            raise FormatError(f"{path}: {log}")
        raise FormatError(
            f"{path}, line 1: {first[:60].decode(errors='replace')!r}; no line is as {listed(Format)} write it. Give"
            " the output of the trainer with its timings, or docs/rl.md's generic format"
        )
    return formats


def _lines(content: bytes) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without what a console puts around them; progress bars end theirs with a return."""
    for number, line in enumerate(content.splitlines(), 1):
        yield number, plain(line.decode(errors="replace").rstrip())
