"""One graph of a model and one table of operators."""

from bevquant_graph._layer_class import layer_class, own_code

__all__ = ["layer_class", "own_code"]
