"""Chapter 8: the life of a request in a serving engine."""
