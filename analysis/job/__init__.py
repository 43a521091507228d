"""A job of any source, loaded and ready for questions."""
