"""The folder that `tracekit collect` puts on the PYTHONPATH of a job."""
