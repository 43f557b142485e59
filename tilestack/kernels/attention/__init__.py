"""Attention and what it is fed with: rotary embedding, norms of heads, gradients of q, k and v."""
