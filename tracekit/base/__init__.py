"""What everything else stands on: errors, text, files, object storage. Imports nothing of tracekit."""
