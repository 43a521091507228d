"""Numerical building blocks that know nothing of jobs: codes for values, robust statistics, means with intervals."""
