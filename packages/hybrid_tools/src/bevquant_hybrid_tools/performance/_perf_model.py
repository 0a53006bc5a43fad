"""perf_model: an estimate of speed as JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bevquant_hybrid.compilation import (
    OPTIONS,
    bpu_calls,
    check_options,
    forward_arguments,
    march_of,
    model_name,
    require_module,
)
from bevquant_hybrid.operators import tensors_in
from bevquant_hybrid.quantization import compile_model
from bevquant_hybrid_tools._template import render
from bevquant_quantizers.documents import text_table, write_whole

from ._estimate import LayerEstimate, estimate_layers, estimate_performance

_FIGURES = {
    "peak_tops": "10¹² int8 operations per second, all cores",
    "cores": "BPU cores",
    "ddr_gigabytes_per_second": "DDR memory, 10⁹ bytes per second",
}


def render_layers(layers: Sequence[LayerEstimate]) -> str:
    """A table of the layers: operations, bytes, operations per byte, time, and its bound.

    Example:
        >>> layer = LayerEstimate("conv", "torch.nn.Conv2d", 2_000_000, 900, 100, 2e-6, 1e-6, "")
        >>> print(render_layers([layer]))
        layer  operator         operations  bytes  op/byte  time (us)  bound
        conv   torch.nn.Conv2d   2,000,000  1,000   2000.0        2.0  compute
        total                    2,000,000  1,000   2000.0        2.0
        An estimate, not a measurement.
    """
    rows = [["layer", "operator", "operations", "bytes", "op/byte", "time (us)", "bound"]]
    for layer in layers:
        rows.append(
            [
                *(layer.path, layer.operator, f"{layer.operations:,}"),
                f"{layer.loaded_bytes + layer.stored_bytes:,}",
                *(f"{layer.intensity:.1f}", f"{layer.seconds * 1e6:.1f}"),
                f"with {layer.fused_into}" if layer.fused_into else layer.bound,
            ]
        )
    operations, moved, seconds = _totals(layers).values()
    intensity = f"{operations / moved:.1f}" if moved else "0.0"
    rows.append(
        ["total", "", f"{operations:,}", f"{moved:,}", intensity, f"{seconds * 1e6:.1f}", ""]
    )
    return f"{text_table(rows, right=range(2, 6))}\nAn estimate, not a measurement."


def render_page(summary: Mapping[str, Any], layers: Sequence[LayerEstimate]) -> str:
    """The page of an estimate."""
    facts = {
        "frames per second": _three_digits(summary["FPS"]),
        "latency": _duration(summary["latency (us)"]),
        "operations per run": f"{summary['BPU OPs per run (effective)']:,}",
        "DDR memory per run": f"{summary['DDR megabytes per run']:,.3f} MiB",
        "frames per run": summary["frame per run"],
        "BPU cores": summary["BPU core number"],
    }
    note, figures = summary["estimate"].partition(": ")[2], summary["figures"]
    return render(
        __package__,
        "page.html",
        title=f"{summary['model name']} on {summary['BPU march']}",
        inputs=", ".join(f"{name} {size}" for name, size in summary["input features"][1:]),
        note=note[:1].upper() + note[1:],
        facts=facts.items(),
        layers=layers,
        **_totals(layers),
        longest=max((layer.seconds for layer in layers), default=0.0),
        chip=figures["chip"],
        figures=[(text, figures[name]) for name, text in _FIGURES.items()],
    )


def _totals(layers: Sequence[LayerEstimate]) -> dict[str, Any]:
    """Operations, bytes moved and seconds of all layers."""
    return {
        "operations": sum(layer.operations for layer in layers),
        "moved": sum(layer.loaded_bytes + layer.stored_bytes for layer in layers),
        "seconds": sum(layer.seconds for layer in layers),
    }


def _duration(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{_three_digits(microseconds)} µs"
    return f"{_three_digits(microseconds / 1000)} ms"


def _three_digits(value: float) -> str:
    """Three significant digits: an estimate is not finer."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


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
    bandwidth, both from public pages, which the result names. It is neither a measurement nor a
    compiler's forecast: use it to compare layers and models, and measure frame rates on a board.

    Arguments are those of `compile_model`, and the model may have any form: float with stubs,
    prepared, converted, or converted and traced. ``out_dir`` is the folder of the two files. With
    ``hbm``, a converted model's program is written too. ``layer_details`` lists the layers in the
    result and prints them. Compiler options are checked and recorded, without effect on the
    figures.

    Returns:
        ``{"summary": {…}}`` with the documented keys as far as they can be estimated; in addition,
        ``"estimate"`` explains the method and ``"figures"`` lists the sources.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A hybrid model, a float operator, an unknown value of an argument, or no march
            is set.
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
    given = locals()  # the arguments: nothing else has a name yet
    asked = {name: given[name] for name in OPTIONS}
    caller = "perf_model"
    require_module(caller, module)
    target = march_of(march, caller)
    arguments = forward_arguments(module, example_inputs, caller)
    count = sum(1 for _ in tensors_in(arguments))
    options = check_options(caller, count, jobs=jobs, **asked)
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
        compile_model(module, example_inputs, hbm, target, called, **asked)
    if layer_details:
        print(render_layers(layers))
    print(f"FPS={summary['FPS']}, latency = {summary['latency (us)']} us   (see {page})")
    print("An estimate from public figures, not a measurement.")
    print("HBDK performance estimation SUCCESS")
    return result
