"""Comparisons of a file with the model that it was written from."""
