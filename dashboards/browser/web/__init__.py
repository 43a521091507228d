"""The server: the application, access control, health, metrics, files, and the command that starts it."""
