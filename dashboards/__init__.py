"""The browser dashboard: queries, figures, pages."""
