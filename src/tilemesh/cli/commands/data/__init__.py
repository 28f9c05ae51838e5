"""Prepare large data for training."""
