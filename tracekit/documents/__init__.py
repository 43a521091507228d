"""Reports as files to hand on: Markdown for tickets, one HTML page that needs no network."""
