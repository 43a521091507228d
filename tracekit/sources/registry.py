"""The registry of sources: every kind of path that tracekit reads, shows or knows to be something else.

In: nothing. Out: `SOURCES`, in the order in which they are tried. To add a format, add an entry here, its rule to
`collectors/importers/sniff.py`, and its reader to `collectors/importers/`.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.base.errors import FormatError, SelectionError, TracekitError
from tracekit.base.paths import Look, command, object_url, quoted
from tracekit.base.text import short
from tracekit.collectors.importers import sniff
from tracekit.collectors.importers.sniff import SUFFIXES, is_export, is_gpu_trace, is_profile
from tracekit.sources.source import Content, ReadOptions, Source, one_error
from tracekit.trace import facts
from tracekit.trace.model import TIMELINE_MARK, TimeUnit, TraceKind

if TYPE_CHECKING:
    from tracekit.analysis.job.graph import GraphJob
    from tracekit.analysis.job.job import Job
    from tracekit.analysis.job.pipeline import PipelineJob
    from tracekit.analysis.job.rl_job import RlJob
    from tracekit.analysis.replay import Method
    from tracekit.store.catalogue_rows import AnyTrace
    from tracekit.trace.canonical import Trace

_Sentence = Callable[[Look, Content], str]
#: Files that mark folders of tracekit.
STUDY_MARK, RUN_FILE = "tracekit-study", "run.json"
PARQUET = ".parquet"
#: Endings of files other than Parquet that are traces if their first bytes say so.
OTHER_ENDINGS = (".json", ".json.gz", ".sqlite", ".log", ".txt", ".jsonl")
_PARQUET_BYTES = b"PAR1"
_COLLECTORS_PAGE, _FORMATS_PAGE = "collecting.md", "traces.md"


def other_recording(look: Look) -> str | None:
    """The description of another tool's recording, and what to do; None for anything else."""
    from tracekit.collectors.importers.kineto.json_events import other_recording as recognised

    return recognised(look)


def other_log(look: Look) -> str | None:
    """The description of a log of a trainer or of NCCL, and what to do; None for anything else."""
    return sniff.other_log(look.head, look.path) or sniff.other_log(look.tail, look.path)


def written(title: str, hint: str) -> _Sentence:
    """A file that tracekit wrote for people. `hint`: what to do with it."""

    def sentence(look: Look, wanted: Content) -> str:
        instead = ", or name the trace that it was made from" if wanted is Content.TRACE else ""
        return f"{title}, not {wanted}; {hint.format(quoted(look.path))}{instead}"

    return sentence


def is_table(path: Path) -> bool:
    """Whether a file is a table of a report, as Parquet; False if it cannot be read."""
    from tracekit.analysis.job.pipeline_report import TABLE_FILE

    try:
        if not path.is_file():  # a pipe would block
            return False
        with path.open("rb") as file:
            return TABLE_FILE.recognises(file)
    except OSError:
        return False


def table_text(path: Path, wanted: Content = Content.TRACE) -> str:
    """The error about a table of a report."""
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


def to_get(wanted: Content) -> str:
    """How to get the content that a command wants."""
    match wanted:
        case Content.DUMPS:
            return "name the folder with the flight-recorder dumps of all ranks"
        case Content.STUDY:
            return f"`{command('fleet', 'run', 'TRACES', '--out', 'STUDY')}` makes one"
        case Content.STORE:
            return f"`{command('import', 'TRACE', '--store', 'STORE')}` makes one"
        case Content.RUN:
            return "watch the folder of `tracekit collect --segments`, a log of RL post-training, or a store"
        case _:
            return "`tracekit import --format` lists the formats that tracekit reads"


def _describe_text(look: Look, wanted: Content) -> str:
    kind = "a file" if b"\0" in look.head else "a text file"
    return f"{kind}, not {wanted}; {to_get(wanted)}"


def _json(_: Look, wanted: Content) -> str:
    kind = "not JSON that tracekit reads" if wanted is Content.TRACE else f"JSON, not {wanted}"
    return f"{kind}; {to_get(wanted)}"


def _with_advice(title: str, advice: str) -> _Sentence:
    return lambda _, wanted: f"{title}, not {wanted}; {advice}"


def _is_empty(look: Look) -> bool:
    return look.is_readable and not look.head


def _name_ends_with(*endings: str) -> Callable[[Look], bool]:
    return lambda look: look.is_readable and look.name.endswith(endings)


def _begins(text: bytes) -> Callable[[Look], bool]:
    return lambda look: look.head.startswith(text)


def _other(name: str, sniff: Callable[[Look], bool], sentence: _Sentence) -> Source:
    return Source(name, f"a {name}", sniff, sentence=sentence)


def _recognised(name: str, describe: Callable[[Look], str | None]) -> Source:
    """A path of another tool. `describe`: the sentence about it, None for anything else."""
    return _other(name, lambda look: describe(look) is not None, lambda look, _: str(describe(look)))


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
    _recognised("other-recording", other_recording),
    _other("script", _name_ends_with(".py", ".sh"), _script),
    _other("layout", _name_ends_with(".yaml", ".yml"), _layout),
    _recognised("other-log", other_log),
    _other("empty-file", _is_empty, _with_advice("an empty file", "record or copy it again")),
    _other(
        "empty-folder",
        lambda look: look.is_folder and not look.entries,
        lambda _, wanted: f"an empty folder, not {wanted}; {to_get(wanted)}",
    ),
    _other(
        "empty-files",
        lambda look: bool(look.entries) and all(map(_is_empty, look.entries)),
        _with_advice("a folder with nothing but empty files", "record or copy them again"),
    ),
    _other(
        "zstd",
        lambda look: any(file.head.startswith(b"\x28\xb5\x2f\xfd") for file in (look, *look.entries)),
        _with_advice("packed with zstd", "unpack it with `zstd -d`, or pack it with gzip, which tracekit reads"),
    ),
    _other("json", _name_ends_with(".json", ".json.gz"), _json),
    _other("file", lambda look: look.is_readable and look.path.suffix != ".gz", _describe_text),
)


def job_of(trace: AnyTrace, method: Method | str = "tracekit") -> PipelineJob | GraphJob | RlJob:
    """Return the job of a trace. `method` as in `load`. Raises SelectionError for an unknown one, and for an op trace
    with another one than the default.
    """
    from tracekit.analysis.replay import Method

    if trace.kind is TraceKind.OPS:
        if Method.named(method) is not Method.TRACEKIT:
            raise SelectionError(f"--method is for pipeline traces; {short(trace.name)} is an op trace: leave it out")
        from tracekit.trace.post_training import POST_TRAINING

        if POST_TRAINING in trace.metadata:
            from tracekit.analysis.job.rl_job import RlJob

            return RlJob(trace)
        from tracekit.analysis.job.graph import GraphJob

        return GraphJob(trace)
    from tracekit.analysis.job.pipeline import PipelineJob

    return PipelineJob(trace, Method.named(method))


def _reading(reader: str | Callable[..., AnyTrace], form: str = "") -> Callable[[Sequence[Path], ReadOptions], Job]:
    """Read one path as the job of a trace. `reader`: takes a path, `layout` and `unit`; as text, a module below
    `tracekit` and its function, which are imported then. `form`: the name of a format that states sizes and units
    itself, whose reader takes a path alone.
    """

    def read(paths: Sequence[Path], options: ReadOptions) -> Job:
        (path,) = paths
        with one_error(path):
            if form and options.layout is not None:
                raise FormatError(f"{path}: {form} carries its layout; leave out --layout")
            if form and options.unit is not None:
                raise FormatError(f"{path}: {form} fixes the unit of its times; leave out --unit")
            function = reader
            if isinstance(function, str):
                module, _, name = function.rpartition(".")
                function = getattr(import_module(f"tracekit.{module}"), name)
            trace = function(path) if form else function(path, layout=options.layout, unit=options.unit)
        return job_of(trace, options.method or "tracekit")

    return read


def read_canonical(path: Path, *, layout: Path | None, unit: TimeUnit | None) -> Trace:
    """Read a trace that tracekit wrote. Raises FormatError for a layout, which is in the file."""
    from tracekit.trace.canonical import read_parquet

    if layout is not None:
        raise FormatError(f"{path}: a canonical trace contains its layout; leave out --layout")
    try:
        return read_parquet(path, unit=unit)
    except FormatError:
        if not is_table(path):
            raise
        raise FormatError(f"{path}: {table_text(path)}") from None


def read_published(path: Path, *, layout: Path | None, unit: TimeUnit | None) -> Trace:
    """Read a published trace. Raises FormatError without its layout."""
    from tracekit.collectors.importers.published import read_published as read

    if layout is None:
        raise FormatError(f"{path}: a published trace needs its layout; add --layout meta.yaml")
    return read(path, layout, unit=unit)


def read_gpus(paths: Sequence[Path], options: ReadOptions) -> Job:
    """Read files or folders of torch.profiler or Nsight Systems as one job."""
    from tracekit.analysis.job.graph import RecordingJob
    from tracekit.collectors.importers.kineto.reader import read_kineto

    return RecordingJob(read_kineto(list(paths), classes=options.kernel_classes))


def read_post_training(paths: Sequence[Path], _: ReadOptions) -> Job:
    """Read the logs of one run of post-training, which take no options."""
    from tracekit.analysis.job.rl_job import RlJob

    return RlJob.read(list(paths))


def _trace(title: str) -> Callable[[Look, Content], str]:
    """A trace, for a command that reads none."""

    def sentence(look: Look, wanted: Content) -> str:
        many = f", or study many with `{command('fleet', 'run', 'TRACES', '--out', 'STUDY')}`"
        return f"{title}, not {wanted}; type `{command('whatif', look.path)}`{many if wanted is Content.STUDY else ''}"

    return sentence


def _parquet(look: Look, wanted: Content) -> str:
    """A Parquet file: a trace, a table of tracekit, or anybody's."""
    from tracekit.trace.canonical import read_header

    try:
        if read_header(look.path) is not None:
            return _trace("a trace")(look, wanted)
    except TracekitError:
        pass
    return table_text(look.path, wanted) if is_table(look.path) else f"a Parquet file, not {wanted}; {to_get(wanted)}"


def _report(look: Look, wanted: Content) -> str:
    from tracekit.report.report_file import read_report

    try:
        read_report(look.path)
    except TracekitError as error:
        return f"a report, not {wanted}, and {str(error).removeprefix(f'{look.path}: ')}"
    needed = ", but this command needs the ops of its trace" if wanted is Content.TRACE else ""
    return f"a report, not {wanted}; `{command('whatif', look.path)}` shows it{needed}"


def _is_parquet(look: Look) -> bool:
    has_suffix = look.path.suffix == PARQUET and look.exists and not look.is_folder
    return has_suffix or look.head.startswith(_PARQUET_BYTES)


def _is_op_trace(look: Look) -> bool:
    if look.path.suffix != PARQUET or look.is_folder:
        return False
    from tracekit.trace.canonical import is_op_trace

    return is_op_trace(look.path)


def _is_store(look: Look) -> bool:
    from tracekit.base.errors import StoreError
    from tracekit.store import Store

    try:
        return Store(look.path).is_store()
    except StoreError:
        if object_url(look.path) is not None:  # nothing else is read there, and the error says why that is not
            raise
        return False


def _is_post_training(look: Look) -> bool:
    """A log of post-training; a folder whose files are all records of tracekit.rl."""
    files = list(look.files(OTHER_ENDINGS))
    if look.is_folder and (not files or any(entry.name.endswith(PARQUET) for entry in look.entries)):
        return False
    from tracekit.collectors.importers.rl_logs import is_record_of_rl, looks_like_rl

    return all(map(is_record_of_rl, files)) if look.is_folder else looks_like_rl(look)


def _is_report(look: Look) -> bool:
    if not look.text.removeprefix(BOM_UTF8).lstrip().startswith(b"{"):
        return False
    from tracekit.report.report_file import is_report

    return is_report(look)


def _format(
    name: str,
    sniff: Callable[[Look], bool],
    reader: str | Callable[..., AnyTrace],
    description: str,
    page: str = "traces.md",
    kinds: tuple[facts.SourceKind, ...] = (facts.TABLE,),
    sentence: Callable[[Look, Content], str] | None = None,
    *,
    form: str = "",
    in_batches: bool = False,
) -> Source:
    """A pipeline trace. `reader`, `form`: as of `_reading`."""
    return Source(
        name,
        "a recording",
        sniff,
        content=Content.TRACE,
        read=_reading(reader, form),
        takes=frozenset({"layout", "unit", "method"}),
        sentence=sentence or _trace("a recording"),
        description=description,
        page=page,
        kinds=kinds,
        in_batches=in_batches,
    )


def _profiles(name: str, title: str, sniff: Callable[[Look], bool], description: str, page: str) -> Source:
    """Recordings of GPUs, whose files form one job together."""
    return Source(
        name,
        title,
        sniff,
        content=Content.TRACE,
        read=read_gpus,
        takes=frozenset({"kernel-class"}),
        sentence=_trace(title),
        description=description,
        page=page,
        kinds=(facts.RECORDING, facts.RECORDING_OF_ONE),
    )


#: A folder of traces of torch.profiler or exports of Nsight Systems.
PROFILES = _profiles(
    "profiles",
    "traces of torch.profiler",
    lambda look: any(is_gpu_trace(file) for file in look.files(SUFFIXES)),
    "",
    "kineto.md",
)
#: Kinds of paths that plug-ins do not see.
FIRST: tuple[Source, ...] = (
    Source(
        "study",
        "a study",
        lambda look: look.has(STUDY_MARK),
        content=Content.STUDY,
        command=("fleet", "report"),
        page="fleet.md",
    ),
    Source(
        "store",
        "a store",
        _is_store,
        content=Content.STORE,
        command=("store", "list"),
        sentence=lambda look, wanted: f"a store, not {wanted}; type `{command('whatif', '--store', look.path)}`",
        page="store.md",
        kinds=(facts.WINDOW,),
    ),
    _format(
        "segments",
        lambda look: look.has(RUN_FILE),
        "collectors.importers.segments.read_segments",
        "folder of `tracekit collect --segments`; --layout sizes.yaml where its sizes cannot be found",
        _COLLECTORS_PAGE,
        (facts.COLLECT, facts.COLLECT_CPU),
    ),
    Source(
        "op-trace",
        "an op trace",
        _is_op_trace,
        content=Content.TRACE,
        read=_reading("trace.op.read_op_trace", "an op trace"),
        sentence=_trace("a trace"),
        description="Parquet of a job of any shape, one row per op with what it waits for",
        page="traces.md#op-traces-a-job-of-any-shape",
        kinds=(facts.OP_TRACE,),
    ),
    _format(
        "tracekit",
        _is_parquet,
        read_canonical,
        "canonical Parquet written by tracekit",
        sentence=_parquet,
        in_batches=True,
    ),
    _format(
        "published",
        lambda _: False,  # --layout says that a Parquet file is one
        read_published,
        "Parquet + YAML of the straggler study (OSDI'25); give the YAML with --layout",
    ),
    Source(
        "flight-recorder",
        "flight-recorder dumps of a hang",
        sniff.has_dumps,
        content=Content.DUMPS,
        command=("hang",),
        page="hang.md",
        kinds=(facts.DUMPS,),
    ),
    DUMP,
    _format(
        "ndtimeline",
        sniff.is_ndtimeline_log,
        "collectors.importers.ndtimeline.read_raw_log",
        "raw log of veScale NDTimeline (timeline_run*_raw.log)",
        form="an NDTimeline file",
    ),
    _format(
        "ndtimeline-chrome",
        sniff.is_ndtimeline_chrome,
        "collectors.importers.ndtimeline.read_trace_file",
        "Chrome trace of veScale NDTimeline (trace_step*)",
        form="an NDTimeline file",
    ),
    _format(
        "megascan",
        sniff.is_megascan,
        "collectors.importers.megascan.read_ranks",
        "folder of MegaScan (benchmark-data-*-pipeline-*-tensor-*.json)",
        f"{_FORMATS_PAGE}#megascan",
        form="a folder of MegaScan",
    ),
    _format(
        "megascan-chrome",
        sniff.is_megascan_chrome,
        "collectors.importers.megascan.read_aggregated",
        "Chrome trace aggregated by MegaScan (benchmark.json)",
        f"{_FORMATS_PAGE}#megascan",
        form="a trace of MegaScan",
    ),
    _format(
        "nccl-inspector",
        sniff.is_inspector,
        "collectors.importers.nccl_inspector.read_inspector",
        "JSON lines of the NCCL Inspector (<host>-pid<pid>.log, or their folder)",
        f"{_FORMATS_PAGE}#nccl-inspector",
        (facts.INSPECTOR,),
        form="a log of the NCCL Inspector",
    ),
)
#: Kinds of paths that are tried after those of plug-ins, whose formats may look like these.
LAST: tuple[Source, ...] = (
    _profiles(
        "torch.profiler",
        "a trace of torch.profiler",
        is_profile,
        "traces of torch.profiler (.json, .json.gz), one a rank, or their folder",
        "kineto.md",
    ),
    _profiles(
        "nsight-systems",
        "an export of Nsight Systems",
        is_export,
        "exports of Nsight Systems (`nsys export --type sqlite`), or their folder",
        "kineto.md#nsight-systems",
    ),
    PROFILES,
    Source(
        "hang-log",
        "text about a hang",
        sniff.is_hang_log,
        content=Content.DUMPS,
        command=("hang",),
        sentence=lambda look, _: other_log(look) or f"text about a hang; type `{command('hang', look.path)}`",
        page="hang.md",
        kinds=(facts.DUMPS,),
    ),
    Source(
        "post-training",
        "a run of post-training",
        _is_post_training,
        content=Content.TRACE,
        read=read_post_training,
        sentence=lambda look, wanted: f"a log of RL post-training, not {wanted}; type `{command('rl', look.path)}`",
        description="logs of RL post-training, or the folder that tracekit.rl has recorded into",
        page="rl.md",
        kinds=(facts.RL_LOG, facts.TRAJECTORIES),
    ),
    Source(
        "report",
        "a report",
        _is_report,
        content=Content.REPORT,
        sentence=_report,
        page="report-schema.md",
    ),
    *MISFITS,
)
SOURCES: tuple[Source, ...] = (*FIRST, *LAST)
#: The entries whose files form one job together.
GPU_FORMATS = frozenset({"torch.profiler", "nsight-systems", "profiles"})
#: The entries that `--format` can name.
FORMATS = {source.name: source for source in SOURCES if source.description}
