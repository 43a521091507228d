"""Evidence that causes and fixes share: a job split into factors, and changes to its costs."""
