"""The commands of `tracekit`, one file each: thin layers over the library. `options` is what several share."""
