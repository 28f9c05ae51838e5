"""Chapter 11: guessing ahead (speculative decoding)."""
