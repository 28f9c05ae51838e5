"""Chapter 3: collectives."""
