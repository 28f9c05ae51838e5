"""Placing any traced program on a mesh: which part of each tensor every rank has, and what they exchange.

The words are those of `core/tensor_placement.py`. `rules.py`: how each primitive can be computed along an axis;
`propagate.py`: from some tensors' placements to those of all; `local.py`: what one rank computes then. No torch.
"""
