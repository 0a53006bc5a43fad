"""The pass that chooses float16 or float32 for each value of a strongly typed file."""
