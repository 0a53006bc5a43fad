"""Damaged files for every public reader, bad arguments for every kernel."""
