"""What everything else stands on: errors, text, files, S3. Imports nothing of tracekit."""
