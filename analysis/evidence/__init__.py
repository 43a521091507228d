"""What causes and fixes share: a job taken apart into factors, and changes to its costs."""
