"""Kernels that numba and llvmlite compile; nothing here is imported where these are absent."""
