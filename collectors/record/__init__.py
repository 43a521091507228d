"""The code inside a training process: hooks and the recorder. Imports torch and the standard library only."""
