"""Pure functions over a trace: graph, durations, replay, scenarios, attribution."""
