"""Tracing, under its documented path."""
