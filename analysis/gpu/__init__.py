"""GPU recordings: what the GPUs and hosts of a job did, matched across ranks, aligned, attributed."""
