"""Chapter 15: programs as data."""
