"""Chapter 9: the KV cache."""
