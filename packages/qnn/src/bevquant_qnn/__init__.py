"""Quantized modules and the rewriting of float models into them."""
