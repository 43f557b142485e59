"""Softmax of rows, and of the rows of a masked or causal matrix."""
