"""perf_model: what a model would cost on a BPU, as far as public figures tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bevquant_hybrid.compilation import (
    bpu_calls,
    check_options,
    forward_arguments,
    march_of,
    model_name,
    require_module,
)
from bevquant_hybrid.operators import tensors_in
from bevquant_hybrid.quantization import compile_model
from bevquant_hybrid_tools.performance import estimate_layers, estimate_performance, render_layers
from bevquant_hybrid_tools.performance._page import render_page
from bevquant_quantizers.documents import write_whole

__all__ = ["perf_model"]


def perf_model(
    module: nn.Module,
    example_inputs: Any,
    march: str | None = None,
    out_dir: str = ".",
    name: str | None = None,
    hbm: str | None = None,
    input_source: Sequence[str] | str = "ddr",
    input_layout: str | None = None,
    output_layout: str = "NCHW",
    opt: str | int = "O3",
    balance_factor: int = 2,
    progressbar: bool = True,
    jobs: int = 16,
    layer_details: bool = False,
    extra_args: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Estimate the speed of a model on one BPU core, and write it as JSON and as an HTML page.

    Each layer takes the longer of its operations at the chip's peak rate and its bytes at the DDR
    bandwidth, both from public pages that the result names. It is no measurement and no
    compiler's forecast: compare layers and models by it, and measure frame rates on a board.

    Args:
        module: Float with stubs, prepared, converted, or converted and traced.
        example_inputs: One tensor, or a tuple or list of the forward's arguments.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"``; that of the process by default.
        out_dir: Folder of the two files; it is made.
        name: Of the model and the files; that of its class by default.
        hbm: Where to write a converted model too, as `compile_model` does.
        input_source: ``"ddr"``, ``"resizer"`` or ``"pyramid"``, or one for each input.
        input_layout: ``"NCHW"`` or ``"NHWC"``.
        output_layout: The same.
        opt: 0 to 3, ``"O0"`` to ``"O3"``, ``"ddr"``, ``"fast"`` or ``"balance"``. Like all that
            tells a compiler how to work, it is checked and noted, and changes no figure.
        balance_factor: Accepted for old scripts.
        progressbar: Accepted for old scripts.
        jobs: Accepted for old scripts.
        layer_details: List the layers in the result and print them.
        extra_args: Accepted for old scripts.

    Returns:
        ``{"summary": {…}}`` with the documented keys as far as they can be estimated; besides,
        ``"estimate"`` says how the figures came about and ``"figures"`` what they rest on.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A hybrid model, a float operator, an argument with an unknown value, or no
            march is set.
        RuntimeError: The model does not run on the inputs.

    Example:
        >>> import tempfile, torch
        >>> from bevquant_hybrid.quantization import QuantStub
        >>> model = nn.Sequential(QuantStub(scale=1 / 128), nn.Conv2d(3, 8, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = perf_model(
        ...         model, torch.ones(1, 3, 66, 66), march="bayes", out_dir=folder, name="net"
        ...     )  # doctest: +ELLIPSIS
        FPS=..., latency = 4.2 us   (see ...net.html)
        An estimate from public figures, not a measurement.
        HBDK performance estimation SUCCESS
        >>> result["summary"]["BPU OPs per run (effective)"]
        1769472
    """
    caller = "perf_model"
    require_module(caller, module)
    target = march_of(march, caller)
    arguments = forward_arguments(example_inputs, caller)
    options = check_options(
        caller,
        sum(1 for _ in tensors_in(arguments)),
        input_source=input_source,
        input_layout=input_layout,
        output_layout=output_layout,
        opt=opt,
        balance_factor=balance_factor,
        jobs=jobs,
        extra_args=extra_args,
    )
    called = model_name(caller, module, name)
    calls = bpu_calls(caller, module, arguments)
    result = estimate_performance(calls, target, name=called, layer_details=layer_details)
    summary = result["summary"]
    noted = ", ".join(f"{key}={value}" for key, value in options.items() if value)
    summary["compiling options"] = f"{noted}: noted, without effect on an estimate"
    layers = estimate_layers(calls, target)
    folder = Path(out_dir)
    page = write_whole(folder / f"{called}.html", render_page(summary, layers), parents=True)
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / f"{called}.json", text)
    if hbm is not None:
        compile_model(
            module,
            example_inputs,
            hbm,
            target,
            called,
            input_source,
            input_layout,
            output_layout,
            opt,
            balance_factor,
            extra_args=extra_args,
        )
    if layer_details:
        print(render_layers(layers))
    print(f"FPS={summary['FPS']}, latency = {summary['latency (us)']} us   (see {page})")
    print("An estimate from public figures, not a measurement.")
    print("HBDK performance estimation SUCCESS")
    return result
