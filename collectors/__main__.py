"""`python -m tracekit.collectors`: the command `tracekit collect` by itself."""

import sys

from tracekit.collectors.command import collect_command

sys.exit(collect_command.main(standalone_mode=False))
