"""The wall clock: the same method files on real machines, one process per device, over gRPC."""
