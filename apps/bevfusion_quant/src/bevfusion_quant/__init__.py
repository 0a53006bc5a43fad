"""BEVFusion from float PyTorch to verified INT8: the whole job, one command."""
