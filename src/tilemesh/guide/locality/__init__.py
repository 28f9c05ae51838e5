"""Locality on the CPU: small C programs whose reads the ladder's interpreter counts and whose time is measured."""
