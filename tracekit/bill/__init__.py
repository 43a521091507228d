"""The bill of runs: what every hour of their wall clock went to."""
