"""What the analysis computes with that knows nothing of jobs: compiled functions and robust statistics."""
