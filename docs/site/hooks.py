"""Hooks of MkDocs: pages that live beside the code, the commands, the executed notebook, and the paper's figures.

In: the repository. Out: pages generated at each build, so that none of them can be out of date.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import drawings  # beside this file, where MkDocs looks while it loads hooks
import nbformat
import plotly
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient

from tracekit.cli import commands

ROOT = Path(__file__).resolve().parents[2]
#: Pages of the site that are files elsewhere in the repository.
ELSEWHERE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
    "sample_traces/README.md": "samples.md",
    "docs/notebook.ipynb": "notebook.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
#: Raw HTML of a page by the mark that stands for it while the page is Markdown.
_raw: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and Plotly for figures."""
    for source, page in ELSEWHERE.items():
        if source.endswith(".md"):
            text = _relinked((ROOT / source).read_text(encoding="utf-8"), source)
            files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "commands.md", content=commands_page()))
    files.append(File.generated(config, "notebook.md", content=notebook_page(ROOT / "docs/notebook.ipynb")))
    script = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    files.append(File.generated(config, "assets/plotly.min.js", abs_src_path=str(script)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links of pages in docs/ lead to pages of the site; figures of the paper take their places."""
    if page.file.src_uri == "method.md":
        for name, figure in drawings.figures().items():
            markdown = markdown.replace(f"{{{{ {name} }}}}", _plotly(json.loads(figure.to_json())))
    generated = page.file.src_uri in {*ELSEWHERE.values(), "commands.md"}
    return markdown if generated else _relinked(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, **_: Any) -> str:
    """Raw HTML in the places of its marks."""
    for mark, raw in _raw.items():
        html = html.replace(f"<p>{mark}</p>", raw)
    return html


def _relinked(markdown: str, source: str) -> str:
    """Links as the site has them: to its pages, and none to files that are not in it."""
    folder = posixpath.dirname(ELSEWHERE.get(source, source.removeprefix("docs/"))) or "."

    def link(found: re.Match[str]) -> str:
        image, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path not in ELSEWHERE and not path.startswith("docs/"):
            return words
        page = posixpath.relpath(ELSEWHERE.get(path, path.removeprefix("docs/")), folder)
        return f"{image}[{words}]({page}{anchor})"

    return _LINK.sub(link, markdown)


def commands_page() -> str:
    """Every command with its help, as click prints it."""
    parts = [
        "# Commands",
        "",
        "Each command prints this with `--help`. [Exit codes](scripts.md#exit-codes).",
        "",
    ]
    for name, command, context in _walk(commands, click.Context(commands, info_name="tracekit")):
        parts += [f"{'#' * (2 + name.count(' '))} tracekit {name}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(parts)


def _walk(
    group: click.Group, context: click.Context, above: str = ""
) -> Iterator[tuple[str, click.Command, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inside = click.Context(command, info_name=name, parent=context, terminal_width=80, max_content_width=80)
        yield f"{above}{name}", command, inside
        if isinstance(command, click.Group):
            yield from _walk(command, inside, f"{above}{name} ")


def notebook_page(path: Path) -> str:
    """The notebook, executed now, as Markdown. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts += [cell.source, ""]
            continue
        parts += ["```python", cell.source, "```", ""]
        for output in cell.outputs:
            parts += [_output(output), ""]
    return "\n".join(parts)


def _output(output: Any) -> str:
    """One output of a cell: a figure, HTML, or text."""
    data = output.get("data", {})
    if "application/vnd.plotly.v1+json" in data:
        return _plotly(data["application/vnd.plotly.v1+json"])
    if "text/html" in data:
        return _marked(data["text/html"])
    text = output.get("text") or data.get("text/plain", "")
    return f"```text\n{text.rstrip()}\n```"


def _plotly(figure: dict[str, Any]) -> str:
    """A figure that Plotly draws once the page is there."""
    name = f"figure-{len(_raw)}"
    content = json.dumps({"data": figure["data"], "layout": figure["layout"]}).replace("</", "<\\/")
    return _marked(
        f'<script src="assets/plotly.min.js"></script><div id="{name}"></div><script>(function () {{'
        f' const figure = {content}; Plotly.newPlot("{name}", figure.data, figure.layout, {{responsive: true}});'
        " })();</script>"
    )


def _marked(html: str) -> str:
    """A mark for raw HTML, which Markdown leaves alone."""
    mark = f"raw-html-{len(_raw)}-of-this-site"
    _raw[mark] = html
    return mark
