"""Results in 8 bits, with a scale for each row."""
