"""Moving elements: copies and permutations, rows by number, sums, embeddings."""
