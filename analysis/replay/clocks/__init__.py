"""How far each worker's clock is off, and the trace with its clocks set right: see `measure`."""

from tracekit.analysis.replay.clocks.measure import Clocks, measure_clocks, with_clocks_set, workers_text

__all__ = ["Clocks", "measure_clocks", "with_clocks_set", "workers_text"]
