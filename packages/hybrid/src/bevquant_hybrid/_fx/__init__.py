"""Tracing, fusing, placement and preparation of float models."""
