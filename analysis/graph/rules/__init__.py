"""Dependency rules, one module for each family of jobs: which op waits for which."""
