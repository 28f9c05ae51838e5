"""Chapter 16: who cuts what."""
