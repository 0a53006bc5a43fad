"""Fake quantizers and calibrators, compatible with pytorch-quantization."""
