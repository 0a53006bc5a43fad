"""Observers: what range a tensor takes."""
