"""Make the synthetic sample traces anew: `python sample_traces/make.py [DIRECTORY]`.

The same seed gives the same trace, so a test compares the files with what this makes.
"""

import sys
from pathlib import Path

from tracekit.synth import synthesize
from tracekit.synth.simulate import SAMPLES

HERE = Path(__file__).parent


def main() -> None:
    """Write every sample into the directory given, by default this one."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, spec in SAMPLES.items():
        path = folder / f"{name}.parquet"
        synthesize(spec).write_parquet(path)
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
