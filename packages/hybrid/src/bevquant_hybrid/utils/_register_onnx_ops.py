"""Imported by scripts for ``torch.onnx.export``; empty: fake quantizers need no registration."""

from __future__ import annotations
