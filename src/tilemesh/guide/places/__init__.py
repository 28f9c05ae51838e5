"""Chapter 14: where the four models live."""
