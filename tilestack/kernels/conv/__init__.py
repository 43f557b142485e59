"""Convolutions as matrix products whose operand is never written out."""
