"""Dependency rules, one module for each family of jobs."""
