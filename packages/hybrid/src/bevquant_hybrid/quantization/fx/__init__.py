"""What traced models are, under its documented path."""
