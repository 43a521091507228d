"""`tracekit collect`: start a command with the recorder in it, follow it, and make a trace of its records."""
