"""Kinds of paths that hold nothing to analyse, but that people give a command that analyses.

In: nothing. Out: their entries for the registry, each with a sentence that says what the path is and what to type.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tracekit.base.command_line import command, quoted
from tracekit.base.look import Look
from tracekit.collectors.importers import sniff
from tracekit.sources.source import Content, Source
from tracekit.trace.model import TIMELINE_MARK

_Sentence = Callable[[Look, Content], str]


def other_recording(look: Look) -> str | None:
    """What a recording of another tool is, and what to do; None for anything else."""
    from tracekit.collectors.importers.kineto.other_recordings import other_recording as recognised

    return recognised(look)


def other_log(look: Look) -> str | None:
    """What the log of a trainer or of NCCL is, and what to do; None for anything else."""
    from tracekit.collectors.importers.other_logs import other_log as recognised

    return recognised(look.head, look.path) or recognised(look.tail, look.path)


def written(title: str, hint: str) -> _Sentence:
    """A file that tracekit wrote for people. `hint`: what to do with it."""

    def sentence(look: Look, wanted: Content) -> str:
        instead = ", or name the trace that it was made from" if wanted is Content.TRACE else ""
        return f"{title}, not {wanted}; {hint.format(quoted(look.path))}{instead}"

    return sentence


def is_table(path: Path) -> bool:
    """Whether a file is a table of a report, as Parquet; False if it cannot be read."""
    from tracekit.analysis.job.worker_lanes import TABLE_FILE

    try:
        if not path.is_file():  # a pipe would block
            return False
        with path.open("rb") as file:
            return TABLE_FILE.recognises(file)
    except OSError:
        return False


def a_table(path: Path, wanted: Content = Content.TRACE) -> str:
    """What to say of a table of a report."""
    title = "a table that tracekit wrote with --parquet"
    return written(title, "read it with polars or pandas")(Look(path), wanted)


def _one_dump(look: Look, wanted: Content) -> str:
    hang = command("hang", look.path.parent)
    if wanted is Content.DUMPS:
        return f"one flight-recorder dump; name the folder with those of all ranks: `{hang}`"
    return f"a flight-recorder dump, not {wanted}; type `{hang}`"


def _script(look: Look, wanted: Content) -> str:
    run = command("collect", "--", "python" if look.path.suffix == ".py" else "sh", look.path)
    return f"a script, not {wanted}; record what it does: `{run}`"


def _layout(look: Look, wanted: Content) -> str:
    return f"a layout, not {wanted}; give it with its trace: `{command('whatif', 'TRACE', '--layout', look.path)}`"


def to_have(wanted: Content) -> str:
    """How to come by what a command wants."""
    match wanted:
        case Content.DUMPS:
            return "name the folder with the flight-recorder dumps of all ranks"
        case Content.STUDY:
            return f"`{command('fleet', 'run', 'TRACES', '--out', 'STUDY')}` makes one"
        case Content.STORE:
            return f"`{command('import', 'TRACE', '--store', 'STORE')}` makes one"
        case _:
            return "`tracekit import --format` lists the formats that tracekit reads"


def _empty_folder(_: Look, wanted: Content) -> str:
    return f"an empty folder, not {wanted}; {to_have(wanted)}"


def _text(look: Look, wanted: Content) -> str:
    kind = "a file" if b"\0" in look.head else "a text file"
    return f"{kind}, not {wanted}; {to_have(wanted)}"


def _json(_: Look, wanted: Content) -> str:
    kind = "not JSON that tracekit reads" if wanted is Content.TRACE else f"JSON, not {wanted}"
    return f"{kind}; {to_have(wanted)}"


def _advised(title: str, advice: str) -> _Sentence:
    return lambda _, wanted: f"{title}, not {wanted}; {advice}"


def _is_empty(look: Look) -> bool:
    return look.is_readable and not look.head


def _ends(*endings: str) -> Callable[[Look], bool]:
    return lambda look: look.is_readable and look.name.endswith(endings)


def _begins(text: bytes) -> Callable[[Look], bool]:
    return lambda look: look.head.startswith(text)


def _other(name: str, sniff: Callable[[Look], bool], sentence: _Sentence) -> Source:
    return Source(name, f"a {name}", sniff, sentence=sentence)


#: One dump of a hang, whose folder is what to read.
DUMP = Source("dump", "a flight-recorder dump", sniff.is_dump, command=("hang",), sentence=_one_dump, page="hang.md")
#: In the order in which they are tried.
MISFITS = (
    _other(
        "timeline",
        lambda look: TIMELINE_MARK.encode() in look.text[:4096],
        written("a timeline that tracekit wrote", "open it in https://ui.perfetto.dev"),
    ),
    _other(
        "page",
        _begins(b"<!doctype html>\n<!-- tracekit "),
        written("a page that tracekit wrote", "open it in a browser: `xdg-open {}`"),
    ),
    _other(
        "document",
        _begins(b"<!-- tracekit "),
        written("a report in Markdown that tracekit wrote", "it is text to read"),
    ),
    _other(
        "other-recording",
        lambda look: other_recording(look) is not None,
        lambda look, _: str(other_recording(look)),
    ),
    _other("script", _ends(".py", ".sh"), _script),
    _other("layout", _ends(".yaml", ".yml"), _layout),
    _other("other-log", lambda look: other_log(look) is not None, lambda look, _: str(other_log(look))),
    _other("empty-file", _is_empty, _advised("an empty file", "record or copy it again")),
    _other("empty-folder", lambda look: look.is_folder and not look.entries, _empty_folder),
    _other(
        "empty-files",
        lambda look: bool(look.entries) and all(map(_is_empty, look.entries)),
        _advised("a folder with nothing but empty files", "record or copy them again"),
    ),
    _other(
        "zstd",
        lambda look: any(each.head.startswith(b"\x28\xb5\x2f\xfd") for each in (look, *look.entries)),
        _advised("packed with zstd", "unpack it with `zstd -d`, or pack it with gzip, which tracekit reads"),
    ),
    _other("json", _ends(".json", ".json.gz"), _json),
    _other("file", lambda look: look.is_readable and look.path.suffix != ".gz", _text),
)
