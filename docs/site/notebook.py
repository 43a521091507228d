"""Execute docs/notebook.ipynb and keep its outputs in it, for readers who do not run it.

`python docs/site/notebook.py`, with the extras `dev` and `docs`, and Chromium. Figures are kept as images, because
GitHub draws no others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import plotly
from nbclient import NotebookClient
from playwright.sync_api import Page, sync_playwright

NOTEBOOK = Path(__file__).parents[1] / "notebook.ipynb"
CHROMIUM = "/usr/bin/chromium-headless-shell"
PLOTLY = "application/vnd.plotly.v1+json"
#: Width of the images, pixels.
WIDTH = 900
_TO_PNG = """([figure, width]) => Plotly.newPlot("figure", figure.data, figure.layout).then((drawn) =>
    Plotly.toImage(drawn, { format: "png", width: width, height: figure.layout.height }))"""


def main() -> None:
    """Execute the notebook and write it back. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_content('<div id="figure"></div>')
        page.add_script_tag(path=Path(plotly.__file__).parent / "package_data" / "plotly.min.js")
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # when it ran
            for output in cell.get("outputs", []):
                _as_image(output, page)
        browser.close()
    nbformat.write(notebook, NOTEBOOK)


def _as_image(output: Any, page: Page) -> None:
    """Replace the figure of an output, if it is one."""
    figure = output.get("data", {}).get(PLOTLY)
    if figure is not None:
        address: str = page.evaluate(_TO_PNG, [figure, WIDTH])
        title = figure["layout"]["title"]["text"]
        output["data"] = {"image/png": address.partition(",")[2], "text/plain": title}


if __name__ == "__main__":
    main()
