"""The documentation as a site: it builds without a warning or a broken link, and what it generates is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tracekit
from tests.handmade import COMMANDS
from tracekit.sources.load import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in strict mode, where a broken link or anchor is an error, as is a cell of the notebook that fails."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


def test_the_notebook_shows_the_card_the_figures_and_the_tables(site: Path) -> None:
    shown = page(site, "notebook")
    report = load(ROOT / "sample_traces" / "slow_worker.parquet").report
    assert report._repr_html_() in shown
    assert shown.count("Plotly.newPlot") == 4
    assert "BALANCED" in shown
    assert "worker (1,2) like peers:   764 ms, 343 ms less" in shown


def test_every_command_is_in_the_reference_with_its_help(site: Path) -> None:
    shown = page(site, "commands")
    assert all(f'id="tracekit-{name}"' in shown for name in COMMANDS)
    assert 'id="tracekit-store-repair"' in shown
    assert "--gpu-hour" in shown


def test_everything_public_is_in_the_reference(site: Path) -> None:
    shown = page(site, "python")
    named = [name for name in tracekit.__all__ if not name.startswith("__")]
    assert [name for name in named if not re.search(rf'id="tracekit\.[\w.]*\b{name}"', shown)] == []
    assert 'id="tracekit.dashboards.figures.plots.Plots.critical_path"' in shown


def test_the_papers_figures_are_drawn(site: Path) -> None:
    shown = page(site, "method")
    assert shown.count("Plotly.newPlot") == 5
    assert "{{" not in re.sub(r"<script>.*?</script>", "", shown, flags=re.DOTALL)


def test_no_page_asks_another_site_for_anything(site: Path) -> None:
    for path in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*?(?:src|href)="([^"]+)"', path.read_text())
        assert loaded
        assert [one for one in loaded if "://" in one] == [], path.name
