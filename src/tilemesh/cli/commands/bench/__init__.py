"""Measure ours beside what you would use instead."""
