"""A file for hb_mapper as one that onnxruntime runs."""

from __future__ import annotations

import os
from typing import Any

from bevquant_export.dense._runnable import lifted
from bevquant_export.lint._read import load_model


def lift_horizon_onnx(path: str | os.PathLike[str]) -> Any:
    """The model of a file for hb_mapper, in operator set 13, which onnxruntime runs.

    Set 11, which the mapper takes, has no axis for scales per channel: onnx's checker passes such a
    file, and onnxruntime reads the scales along axis 1, which is wrong. Here every one of them gets
    its axis, and a softmax, which flattens in set 11, is written with that; what is computed stays
    the same. A file of another profile comes back as it is.

    Args:
        path: From ``export_qdq_onnx(…, profile="horizon")``.

    Returns:
        An ``onnx.ModelProto``, in memory.

    Example:
        >>> import tempfile, torch
        >>> from bevquant_export import export_qdq_onnx
        >>> from bevquant_qnn import quantize_model
        >>> from bevquant_quantizers import calibrate
        >>> x = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)).eval()
        >>> quantized = quantize_model(net, example_inputs=x).model
        >>> _ = calibrate(quantized, [x])
        >>> file = export_qdq_onnx(quantized, x, f"{tempfile.mkdtemp()}/net.onnx", "horizon")
        >>> lift_horizon_onnx(file.path).opset_import[0].version
        13
    """
    return lifted(load_model(path))
