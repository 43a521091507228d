"""Shared parts of all pages: frame, components, colours, sentences, callbacks and the viewer."""
