"""Fake quantization: float values on the grid of an integer type."""
