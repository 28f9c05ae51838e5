"""Chapter 5: data parallelism."""
