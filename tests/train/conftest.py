"""Puts this folder on the path of the tests below it, for the small models they share."""
