"""Sparse convolution on CPU and CUDA: weight layouts, rulebooks, differentiable kernels."""
