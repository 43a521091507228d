"""`tracekit collect`: starts a command with the recorder in it, follows it, and makes a trace of what it left."""
