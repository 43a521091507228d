"""Files that other tools wrote as traces: one module for each format, and the registry that tells them apart."""
