"""Chapter 12: what PPO really is."""
