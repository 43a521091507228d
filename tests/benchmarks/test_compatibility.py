"""The table of tried versions: rows of this environment are replaced, those of others stay."""

import pytest

from benchmarks import compatibility
from benchmarks.measure import table


def test_a_run_replaces_its_rows_and_keeps_those_of_other_environments(tmp_path, monkeypatch):
    page = tmp_path / "limits.md"
    page.write_text(f"# Stable\n\nText.\n\n{table(compatibility.COLUMNS, [])}\n")
    monkeypatch.setattr(compatibility, "PAGE", page)
    runs = [
        [["3.13.0", "-", "a job", "10", "yes", "0.1.0", "2026-01-01"]],
        [["3.11.7", "2.13.0", "ddp", "7", "no: nothing", "0.1.0", "2026-01-02"]],
        [["3.13.0", "-", "a job", "12", "yes", "0.2.0", "2026-01-03"]],
    ]
    for rows in runs:
        monkeypatch.setattr(compatibility, "_rows", lambda _folder, rows=rows: iter(rows))
        compatibility.main([])
    assert list(compatibility._rows_of(page)) == [*runs[1], *runs[2]]
    assert page.read_text().startswith("# Stable\n\nText.\n\n| Python | torch |")


@pytest.mark.slow
def test_the_slow_worker_of_the_simulated_job_is_named(tmp_path):
    ops, named = compatibility._simulated(tmp_path)
    assert (int(ops.replace(",", "")) > 0, named) == (True, "yes")
