"""The pages of a store, their data and the server."""
