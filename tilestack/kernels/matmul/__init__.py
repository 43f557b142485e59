"""Matrix products, plain and grouped by expert."""
