"""Simulate the jobs behind docs/method.md: `python docs/site/paper_figures.py`.

Out: `paper_figures.csv` beside this file, a row a job: what slows it down, and what the analysis says of it. The site
draws its figures from that file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from tracekit.analysis.attribution.attribution import waste
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.synth import SynthSpec, parse_cause, synthesize
from tracekit.trace.model import Layout

TABLE = Path(__file__).parent / "paper_figures.csv"
#: The causes of the paper's jobs, each with how many jobs of it are simulated, and how strong it is in them.
CAUSES = {
    "none": [""] * 10,
    "slow worker": [f"slow-worker:factor={1.2 + 0.15 * at:.2f}" for at in range(10)],
    "last stage": ["slow-last-stage"] * 10,
    "sequence lengths": ["sequence-length-imbalance"] * 10,
    "garbage collection": ["python-gc"] * 10,
}


def rows() -> Iterator[dict[str, object]]:
    """One job after the other."""
    for cause, specs in CAUSES.items():
        for seed, spec in enumerate(specs):
            causes = (parse_cause(spec),) if spec else ()
            job = synthesize(SynthSpec(layout=Layout(dp=8, pp=4), steps=12, seed=seed, causes=causes))
            found = PipelineJob(job).attribution
            known = [r for r in found.correlation.values() if r is not None and not math.isnan(r)]
            worst = found.worker_slowdown.argmax()
            yield {
                "cause": cause,
                "seed": seed,
                "slowdown": found.slowdown,
                "waste": waste(found.slowdown),
                "m_w": found.m_w,
                "m_s": found.m_s,
                "correlation": sum(known) / len(known),
                "worst_worker": float(found.worker_slowdown.ravel()[worst]),
                "worst_worker_approx": float(found.worker_slowdown_approx.ravel()[worst]),
            }


def main() -> None:
    """Write the table."""
    table = pl.DataFrame(list(rows()))
    table.with_columns(pl.col(pl.Float64).round(4)).write_csv(TABLE)
    print(f"Wrote {TABLE}")


if __name__ == "__main__":
    main()
