"""Chapter 1: processes, rank, world, groups."""
