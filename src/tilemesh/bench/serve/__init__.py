"""Serving measured: offline throughput and online load, ours beside peers, with prediction and limit."""
