"""The commands of `tracekit`, those of one purpose in a file: thin layers over the library."""
