"""Chapter 13: four models."""
