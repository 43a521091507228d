"""Reports as files to share: Markdown for tickets, and a self-contained HTML page."""
