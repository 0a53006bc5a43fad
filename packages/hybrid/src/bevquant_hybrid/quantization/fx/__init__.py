"""Classes of traced models under their documented path."""
