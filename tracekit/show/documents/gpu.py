"""A report on a GPU-recorded job as Markdown, and as one self-contained HTML page.

In: a `GpuReport`. Out: text. Names are escaped wherever they appear; `markdown.py` and `page.py` write the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracekit.base.text import short
from tracekit.report.card import answer_card, plain, table
from tracekit.report.gpu import GpuReport
from tracekit.report.gpu_words import answer_rows, headline, kernel_rows, path_rows, rank_table, recording_sizes
from tracekit.show.documents.elements import head
from tracekit.show.documents.markdown import answer_table, escaped, markdown_table
from tracekit.show.documents.page import BEGINNING

_KERNEL_HEADS = ("Kernels", "Ops", "Time", "Share")
_PATH_HEADS = ("On the critical path", "Time", "Share")


def gpu_markdown(report: GpuReport, *, source: str) -> str:
    """The whole document. `source`: the recording as arguments of a command."""
    kind, said = headline(report)
    parts = [
        f"## {escaped(short(report.recording.name))}",
        escaped(recording_sizes(report)),
        f"**{escaped(str(kind).upper())}: {escaped(said)}**",
        answer_table(answer_rows(report)),
        "### Ranks",
        markdown_table(*rank_table(report)),
        "### Kernels",
        markdown_table(_KERNEL_HEADS, kernel_rows(report)),
        f"```sh\ntracekit whatif {source} --full\n```",
    ]
    return "\n\n".join(parts) + "\n"


def gpu_page(report: GpuReport) -> str:
    """The whole page."""
    kind, said = headline(report)
    name, sizes = plain(short(report.recording.name)), plain(recording_sizes(report))
    return (
        f'{BEGINNING}<html lang="en" class="tracekit">{head(name)}<body><main>'
        f"<header><h1><bdi>{name}</bdi></h1><p>{sizes}</p></header>"
        f"{answer_card(kind, str(kind), said, answer_rows(report))}"
        f"{_section('Ranks', *rank_table(report))}"
        f"{_section('Kernels', _KERNEL_HEADS, kernel_rows(report))}"
        f"{_section('Critical path', _PATH_HEADS, path_rows(report))}"
        "<footer>Made by tracekit.</footer></main></body></html>\n"
    )


def _section(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return f"<section><h2>{title}</h2>{table(heads, rows)}</section>"
