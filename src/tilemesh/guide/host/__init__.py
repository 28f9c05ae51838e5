"""Chapter 10: the CPU in front of the GPU."""
