"""Products with sparse matrices: in blocks, and by compressed rows."""
