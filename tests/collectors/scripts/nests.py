"""A rank that starts a torchrun of its own, as launchers of launchers do, and then trains itself."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).with_name("trains.py"))

inner = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", SCRIPT]
alone = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
subprocess.run(inner, check=True, env=alone)
runpy.run_path(SCRIPT, run_name="__main__")
