"""Chapter 17: making it smaller."""
