"""What a recording is: pipeline steps, ops of any shape, GPU kernels, dumps of hung jobs."""
