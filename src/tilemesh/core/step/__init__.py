"""A training step as data: what each rank does, in which order. Different code makes, checks, times and runs it."""
