"""A run as a folder: its papers, and a recipe followed in it from beginning to end."""
