"""The commands of `tracekit`, a file each: thin, they call the library. `options` is what several share."""
