"""Sparse encoders in standard operators, for runtimes without sparse convolutions."""
