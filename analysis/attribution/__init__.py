"""Attribution of lost time: S and S_x, exact figures for each worker, and their patterns over time and space."""
