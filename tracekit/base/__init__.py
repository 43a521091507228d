"""Basics that all other modules use: errors, text, files, object storage. Imports nothing of tracekit."""
