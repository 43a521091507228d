"""Makes the traces of torch.profiler in gpu_slow_input, simulated: four ranks, one with a slow data loader.

In: a folder to write them into, by default the one beside this file. Run from the repository's root.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judges.kinetosim import Job, Trouble

JOB = Job(ranks=4, steps=3, layers=6, bucket=3, late_us=500.0, troubles=(Trouble(2, input_us=1500.0),), seed=7)


def main() -> None:
    """Write a file per rank."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "gpu_slow_input"
    folder.mkdir(exist_ok=True)
    for path in JOB.run().write(folder):
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
