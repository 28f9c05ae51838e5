"""The activations that operators fuse in; `reference.py` computes them by torch, `kernel.py` in Triton."""

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "squared_relu")
