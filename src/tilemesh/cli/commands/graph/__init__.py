"""Look at a model as a graph of operators."""
