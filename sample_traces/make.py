"""Make the synthetic sample traces anew: `python sample_traces/make.py [DIRECTORY]`.

The same seed gives the same trace, so a test compares the files with what this makes.
"""

import sys
from pathlib import Path

from tracekit.model import Layout
from tracekit.synth import Schedule, SynthSpec, parse_cause, synthesize

HERE = Path(__file__).parent

SPECS = {
    "healthy": SynthSpec(layout=Layout(dp=4, pp=4), steps=12, seed=1, name="healthy"),
    "slow_worker": SynthSpec(
        layout=Layout(dp=4, pp=4),
        steps=12,
        seed=2,
        causes=(parse_cause("slow-worker:dp=1,pp=2,factor=1.8"),),
        name="slow-worker",
    ),
    "slow_last_stage": SynthSpec(
        layout=Layout(dp=2, pp=4, vpp=2),
        schedule=Schedule.INTERLEAVED,
        steps=10,
        seed=3,
        overlap_dp=True,
        record_no_ops=True,
        causes=(parse_cause("slow-last-stage"),),
        name="slow-last-stage",
    ),
    "sequence_lengths": SynthSpec(
        layout=Layout(dp=8, pp=2),
        steps=10,
        seed=4,
        causes=(parse_cause("sequence-length-imbalance"),),
        name="sequence-lengths",
    ),
    "python_gc": SynthSpec(
        layout=Layout(dp=8, pp=1), steps=40, seed=5, causes=(parse_cause("python-gc"),), name="python-gc"
    ),
}


def main() -> None:
    """Write every sample into the directory given, by default this one."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, spec in SPECS.items():
        path = folder / f"{name}.parquet"
        synthesize(spec).write_parquet(path)
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
