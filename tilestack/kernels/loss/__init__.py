"""Cross-entropy over a vocabulary, with and without the head of the model."""
