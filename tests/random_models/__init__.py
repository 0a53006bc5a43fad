"""Random models from float to checked files: fused, quantized, run in integers, saved, written.

`dense`, `sparse` and `hybrid` make a model from a seed, `flow` takes it through every stage and
checks the results, `session` prints a table.
"""
