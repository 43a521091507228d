"""Callbacks that tell `tracekit collect` what a trainer knows and its hooks do not see; a module for each framework."""
