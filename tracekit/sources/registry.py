"""The registry of sources: every kind of path that tracekit reads, shows or knows to be something else.

In: nothing. Out: `SOURCES`, in the order in which they are tried. To add a format, add an entry here, its rule to
`collectors/importers/sniff.py`, and its reader to `collectors/importers/`.
"""

from __future__ import annotations

from collections.abc import Callable

from tracekit.base.command_line import command
from tracekit.base.errors import TracekitError
from tracekit.base.look import Look
from tracekit.collectors.importers import sniff
from tracekit.collectors.importers.kineto.sniff import SUFFIXES, is_export, is_gpu_trace, is_profile
from tracekit.sources.misfits import DUMP, MISFITS, a_table, is_table, other_log, to_have
from tracekit.sources.readers import pipeline, read_gpus, read_ops, read_post_training
from tracekit.sources.source import Content, Source
from tracekit.trace import facts

#: Files that mark folders of tracekit.
STUDY_MARK, RUN_FILE = "tracekit-study", "run.json"
PARQUET = ".parquet"
#: Endings of files other than Parquet that are traces if their first bytes say so.
OTHER_ENDINGS = (".json", ".json.gz", ".sqlite", ".log", ".txt", ".jsonl")
_PARQUET_BYTES = b"PAR1"
_IMPORTERS = "tracekit.collectors.importers"
_COLLECTORS_PAGE, _FORMATS_PAGE = "collecting.md", "traces.md"


def _trace(title: str) -> Callable[[Look, Content], str]:
    """A trace, for a command that reads none."""

    def sentence(look: Look, wanted: Content) -> str:
        many = f", or study many with `{command('fleet', 'run', 'TRACES', '--out', 'STUDY')}`"
        return f"{title}, not {wanted}; type `{command('whatif', look.path)}`{many if wanted is Content.STUDY else ''}"

    return sentence


def _parquet(look: Look, wanted: Content) -> str:
    """A Parquet file: a trace, a table of tracekit, or anybody's."""
    from tracekit.trace.parquet_file import read_header

    try:
        if read_header(look.path) is not None:
            return _trace("a trace")(look, wanted)
    except TracekitError:
        pass
    return a_table(look.path, wanted) if is_table(look.path) else f"a Parquet file, not {wanted}; {to_have(wanted)}"


def _report(look: Look, wanted: Content) -> str:
    if wanted is Content.TRACE:
        return f"a report, not {wanted}; `{command('whatif', look.path)}` shows it, all else needs its trace"
    return f"a report of `tracekit whatif --json`, not {wanted}; name {wanted}"


def _is_parquet(look: Look) -> bool:
    named = look.path.suffix == PARQUET and look.exists and not look.is_folder
    return named or look.head.startswith(_PARQUET_BYTES)


def _is_op_trace(look: Look) -> bool:
    if look.path.suffix != PARQUET or look.is_folder:
        return False
    from tracekit.trace.op import is_op_trace

    return is_op_trace(look.path)


def _is_store(look: Look) -> bool:
    from tracekit.base.errors import StoreError
    from tracekit.store import Store

    try:
        return Store(look.path).is_store()
    except StoreError:
        return False


def _is_post_training(look: Look) -> bool:
    """A log of post-training; a folder whose files are all records of tracekit.rl."""
    files = list(look.files(OTHER_ENDINGS))
    if look.is_folder and (not files or any(entry.name.endswith(PARQUET) for entry in look.entries)):
        return False
    from tracekit.collectors.importers.rl.reader import is_record_of_rl, looks_like_rl

    return all(map(is_record_of_rl, files)) if look.is_folder else looks_like_rl(look)


def _is_hang_log(look: Look) -> bool:
    from tracekit.collectors.importers.other_logs import is_hang_log

    return is_hang_log(look)


def _format(
    name: str,
    sniff: Callable[[Look], bool],
    reader: str,
    description: str,
    page: str = "traces.md",
    kinds: tuple[facts.SourceKind, ...] = (facts.TABLE,),
    sentence: Callable[[Look, Content], str] | None = None,
) -> Source:
    """A pipeline trace. `reader`: the module below `importers` and its function."""
    module, _, function = reader.rpartition(".")
    return Source(
        name,
        "a recording",
        sniff,
        content=Content.TRACE,
        read=pipeline(module if "." in module else f"{_IMPORTERS}.{module}", function),
        takes=frozenset({"layout", "unit", "method"}),
        sentence=sentence or _trace("a recording"),
        description=description,
        page=page,
        kinds=kinds,
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
#: Kinds of paths that plug-ins are not asked about.
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
        "segments.read_segments",
        "folder of `tracekit collect --segments`; --layout sizes.yaml where its sizes cannot be found",
        _COLLECTORS_PAGE,
        (facts.COLLECT, facts.COLLECT_CPU),
    ),
    Source(
        "op-trace",
        "an op trace",
        _is_op_trace,
        content=Content.TRACE,
        read=read_ops,
        sentence=_trace("a trace"),
        description="Parquet of a job of any shape, one row per op with what it waits for",
        page="traces.md#op-traces-a-job-of-any-shape",
        kinds=(facts.OP_TRACE,),
    ),
    _format(
        "tracekit",
        _is_parquet,
        "tracekit.sources.readers.read_canonical",
        "canonical Parquet written by tracekit",
        sentence=_parquet,
    ),
    _format(
        "published",
        lambda _: False,  # --layout says that a Parquet file is one
        "tracekit.sources.readers.read_published",
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
        "ndtimeline.read_raw_log",
        "raw log of veScale NDTimeline (timeline_run*_raw.log)",
    ),
    _format(
        "ndtimeline-chrome",
        sniff.is_ndtimeline_chrome,
        "ndtimeline.read_trace_file",
        "Chrome trace of veScale NDTimeline (trace_step*)",
    ),
    _format(
        "megascan",
        sniff.is_megascan,
        "megascan.read_ranks",
        "folder of MegaScan (benchmark-data-*-pipeline-*-tensor-*.json)",
        f"{_FORMATS_PAGE}#megascan",
    ),
    _format(
        "megascan-chrome",
        sniff.is_megascan_chrome,
        "megascan.read_aggregated",
        "Chrome trace aggregated by MegaScan (benchmark.json)",
        f"{_FORMATS_PAGE}#megascan",
    ),
    _format(
        "nccl-inspector",
        sniff.is_inspector,
        "nccl_inspector.read_inspector",
        "JSON lines of the NCCL Inspector (<host>-pid<pid>.log, or their folder)",
        f"{_FORMATS_PAGE}#nccl-inspector",
        (facts.INSPECTOR,),
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
        _is_hang_log,
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
        lambda look: look.head.lstrip().startswith(b'{"report_version"'),
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
