"""What scripts import before ``torch.onnx.export``; fake quantizers bring their own ONNX nodes."""

from __future__ import annotations
