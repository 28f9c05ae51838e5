"""Chapter 4: the machine."""
