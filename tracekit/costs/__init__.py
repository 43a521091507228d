"""The costs of a window, which bills, stores and the verdict of a run add up."""
