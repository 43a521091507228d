"""Independent judges of the analysis: simulators and rules that share no code and no model with tracekit."""
