"""The forms of a recording: pipeline steps, ops of any shape, GPU kernels, dumps of hung jobs."""
