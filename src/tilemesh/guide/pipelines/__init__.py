"""Chapter 7: pipelines."""
