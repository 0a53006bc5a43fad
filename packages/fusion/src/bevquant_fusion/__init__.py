"""Fold batch normalisation into dense and sparse convolutions, found by data flow."""
