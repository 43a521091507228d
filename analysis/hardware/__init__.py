"""What a job would take on other GPUs, and in other precisions."""
