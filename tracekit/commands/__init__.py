"""The commands of `tracekit`, one file each: thin layers over the library. `options` has their shared options."""
