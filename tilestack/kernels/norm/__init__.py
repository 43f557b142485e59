"""Norms of rows in registers, of long rows, of rows that start off 16 bytes, and of groups."""
