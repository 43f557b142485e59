"""One result for each element: vectors, activations, gated pairs, dropout."""
