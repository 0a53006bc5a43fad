"""Compare the weights of a float model with those of its QAT or fixed-point form."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bevquant_hybrid.nn.intrinsic import Fused
from bevquant_hybrid.nn.qat import SegmentLUT
from bevquant_hybrid.nn.quantized import FixedPoint
from bevquant_hybrid.qtensor import as_float
from bevquant_hybrid_tools.quant_profiler._calls import named_operators
from bevquant_hybrid_tools.quant_profiler._compared import measure_of
from bevquant_hybrid_tools.quant_profiler._features import fixed_weight
from bevquant_hybrid_tools.quant_profiler._tables import grid_table, write_histograms, write_text


def compare_weights(
    float_model: nn.Module,
    qat_quantized_model: nn.Module,
    similarity_func: str | Callable[..., Any] = "Cosine",
    with_tensorboard: bool = False,
    tensorboard_dir: str | os.PathLike[str] | None = None,
    out_dir: str | os.PathLike[str] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Compare weights layer by layer; print the table and write ``weight_comparison.txt``.

    Folding a batch norm changes a weight: pass the float model after `fuse_fx` or `fuse_modules`.
    A QAT model's weights are taken as they train, before rounding; a converted one's are the
    integers times their scale. Atol is the largest difference.

    Args:
        float_model: Float model, or an earlier form of the other.
        qat_quantized_model: Calibration, QAT or converted model.
        similarity_func: As in `featuremap_similarity`.
        with_tensorboard: Write histograms for TensorBoard.
        tensorboard_dir: Where; None for its own choice.
        out_dir: Folder of the file; None for the current one.

    Returns:
        By name, ``layer1.0.conv.weight``, the weights ``"float"`` and ``"quantized"``.

    Raises:
        ImportError: `with_tensorboard` and TensorBoard is not installed.
        ValueError: An unknown measure, or no weight in common.
    """
    measure = measure_of(similarity_func, "compare_weights")
    floats = dict(float_model.named_modules(remove_duplicate=False))
    found: dict[str, dict[str, Tensor]] = {}
    rows = []
    for path, module in named_operators(qat_quantized_model)[0].items():
        quantized = _weight(module)
        anchor = getattr(module, "anchor_path", "")
        reference = _weight(floats.get(path))
        if reference is None:
            reference = _weight(floats.get(anchor))
        if quantized is None or reference is None or quantized.shape != reference.shape:
            continue
        name = f"{path}.weight" if path else "weight"
        x, y = reference.cpu(), quantized.cpu()
        found[name] = {"float": x, "quantized": y}
        atol = float((x.double() - y.double()).abs().max()) if x.numel() else 0.0
        rows.append([name, f"{measure(x, y):.7f}", f"{atol:.7f}"])
    if not rows:
        raise ValueError(
            "compare_weights: the models have no weight of the same name and shape; pass two forms "
            "of one model, the float one fused"
        )
    table = grid_table(["Weight Name", "Similarity", "Atol"], rows)
    print(table)
    write_text(out_dir, "weight_comparison.txt", f"{table}\n")
    if with_tensorboard:
        titles = [f"{name}/{form}" for name, forms in found.items() for form in forms]
        tensors = [(weight, 0) for forms in found.values() for weight in forms.values()]
        write_histograms(titles, tensors, tensorboard_dir)
    return found


def _weight(module: nn.Module | None) -> Tensor | None:
    """The weight of a layer in any form, as floats."""
    if isinstance(module, Fused):
        module = module.part("conv")
    elif isinstance(module, SegmentLUT):
        module = module.function
    weight: Any = getattr(module, "weight", None)
    if module is None or not isinstance(weight, Tensor):
        return None
    if isinstance(module, FixedPoint):
        return as_float(fixed_weight(module)).detach().clone()
    return weight.detach().clone()
