"""Every stored job is of a kind, and the pages that it offers exist."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import dash

from tests.cases import case
from tests.dashboards.page_text import Pages
from tracekit.dashboards.browser.data.stored_kinds import KINDS
from tracekit.dashboards.figures.lanes import LEVELS
from tracekit.report.tables import Outline
from tracekit.store import Store
from tracekit.trace.model import TraceKind


def test_every_trace_and_every_source_of_a_report_has_a_kind() -> None:
    assert {*KINDS} == {*TraceKind, *get_args(get_type_hints(Outline)["source"])}


def test_the_pages_of_a_kind_are_registered_with_their_titles(tmp_path: Path) -> None:
    Pages(Store(tmp_path / "jobs.store").path)
    titles = {page["path"]: page["name"] for page in dash.page_registry.values()}
    for name, kind in KINDS.items():
        with case(name):
            assert {path: titles[path] for path in kind.pages} == dict(kind.pages)
            assert ("/workers" in kind.pages) == (kind.no_workers is None)
            assert "job" in kind.compared


def test_a_timeline_without_peers_has_a_level_for_each_colour_and_leaves_no_choice_of_a_replay() -> None:
    for name, kind in KINDS.items():
        with case(name):
            assert len(kind.timeline.levels) == len(LEVELS)
            assert ("view" in kind.timeline.fixed) != kind.timeline.peers
