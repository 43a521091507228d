"""The server: the application, who may look, health, metrics, files, and the command that starts it."""
