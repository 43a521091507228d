"""What the time of a window went to: what bills, stores and the verdict of a run add up."""
