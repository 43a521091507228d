"""Detectors: one file for each kind of finding."""
