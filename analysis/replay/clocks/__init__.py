"""Clock offsets of the workers, and the trace with the offsets removed: see `measure`."""

from tracekit.analysis.replay.clocks.measure import Clocks, measure_clocks, with_clocks_set, workers_text

__all__ = ["Clocks", "measure_clocks", "with_clocks_set", "workers_text"]
