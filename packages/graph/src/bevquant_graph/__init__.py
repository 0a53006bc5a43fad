"""One graph of a model and one table of operators."""
