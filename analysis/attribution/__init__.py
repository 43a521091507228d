"""Who costs what: S and S_x, exact figures for each worker, their patterns over time and space."""
