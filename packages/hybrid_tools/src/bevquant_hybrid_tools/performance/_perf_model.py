"""perf_model: an estimate of speed as JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
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
from bevquant_quantizers.documents import text_table, write_whole

from ._estimate import LayerEstimate, estimate_layers, estimate_performance

_STYLE = """
:root { --page:#fff; --ink:#1d2733; --soft:#5b6876; --line:#dde3e9; --note:#fff6e0;
  --rim:#e8c477; --compute:#c2741a; --memory:#2f6fb3; }
@media (prefers-color-scheme: dark) { :root { --page:#12161b; --ink:#e8edf2; --soft:#a3afbb;
  --line:#2b333c; --note:#332813; --rim:#7a5c23; --compute:#e5a14b; --memory:#6ea8e6; } }
body { background:var(--page); color:var(--ink); margin:2rem auto; max-width:72rem;
  padding:0 1.5rem; font:15px/1.5 system-ui,sans-serif }
h1 { font-size:1.35rem; margin:0 0 .25rem } h2 { font-size:1.05rem; margin:2rem 0 .5rem }
.note { background:var(--note); border:1px solid var(--rim); border-radius:8px; margin:1rem 0;
  padding:.7rem 1rem } .note b { display:block }
.facts { display:flex; flex-wrap:wrap; gap:.75rem; margin:1rem 0; padding:0; list-style:none }
.facts li { border:1px solid var(--line); border-radius:8px; padding:.5rem .9rem; min-width:8rem }
.facts b { display:block; font-size:1.15rem; font-variant-numeric:tabular-nums }
.facts span, .soft, td.soft { color:var(--soft); font-size:.87rem }
.scroll { overflow-x:auto }
table { border-collapse:collapse; width:100%; font-size:.87rem }
th { color:var(--soft); font-weight:600; text-align:left; white-space:nowrap }
th, td { border-bottom:1px solid var(--line); padding:.3rem .7rem .3rem 0; vertical-align:middle }
td.n, th.n { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap }
td.path { font-family:ui-monospace,Menlo,Consolas,monospace; overflow-wrap:anywhere }
td.bars { min-width:13rem; width:30% }
.bar { height:6px; border-radius:3px; margin:2px 0; min-width:1px }
.compute { background:var(--compute) } .memory { background:var(--memory) }
.key { display:inline-block; width:1.4rem; height:6px; border-radius:3px; margin:0 .3rem .15rem 0 }
tfoot td { border:0; font-weight:600 } a { color:var(--memory); overflow-wrap:anywhere }
"""
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
    operations = sum(layer.operations for layer in layers)
    moved = sum(layer.loaded_bytes + layer.stored_bytes for layer in layers)
    seconds = sum(layer.seconds for layer in layers)
    intensity = f"{operations / moved:.1f}" if moved else "0.0"
    rows.append(
        ["total", "", f"{operations:,}", f"{moved:,}", intensity, f"{seconds * 1e6:.1f}", ""]
    )
    return f"{text_table(rows, right=range(2, 6))}\nAn estimate, not a measurement."


def render_page(summary: Mapping[str, Any], layers: Sequence[LayerEstimate]) -> str:
    """The page of an estimate."""
    title = f"{summary['model name']} on {summary['BPU march']}"
    facts = (
        ("frames per second", _three_digits(summary["FPS"])),
        ("latency", _duration(summary["latency (us)"])),
        ("operations per run", f"{summary['BPU OPs per run (effective)']:,}"),
        ("DDR memory per run", f"{summary['DDR megabytes per run']:,.3f} MiB"),
        ("frames per run", f"{summary['frame per run']}"),
        ("BPU cores", f"{summary['BPU core number']}"),
    )
    inputs = ", ".join(f"{name} {size}" for name, size in summary["input features"][1:])
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}: estimate</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<div class="soft">inputs: {escape(inputs)} (batch, height, width, channels)</div>',
            '<div class="note"><b>An estimate, not a measurement</b>'
            f"{escape(_without_headline(summary['estimate']))}</div>",
            '<ul class="facts">',
            *(
                f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>"
                for name, value in facts
            ),
            "</ul>",
            *_layers(layers),
            *_sources(summary["figures"]),
            "</body></html>\n",
        ]
    )


def _duration(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{_three_digits(microseconds)} µs"
    return f"{_three_digits(microseconds / 1000)} ms"


def _three_digits(value: float) -> str:
    """Three significant digits: an estimate is not finer."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _without_headline(text: str) -> str:
    return text.partition(": ")[2][:1].upper() + text.partition(": ")[2][1:]


def _layers(layers: Sequence[LayerEstimate]) -> list[str]:
    longest = max((max(la.compute_seconds, la.memory_seconds) for la in layers), default=0.0)
    total = sum(layer.seconds for layer in layers)
    moved = sum(layer.loaded_bytes + layer.stored_bytes for layer in layers)
    heads = (
        '<th>layer</th><th>operator</th><th class="n">operations</th><th class="n">bytes</th>'
        '<th class="n">op/byte</th><th class="n">µs</th><th class="n">share</th><th>takes</th>'
    )
    return [
        "<h2>Layers</h2>",
        '<div class="soft"><span class="key compute"></span>computing at the peak rate &nbsp; '
        '<span class="key memory"></span>loading and storing; the longer one counts</div>',
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>',
        *(_row(layer, longest, total) for layer in layers),
        '</tbody><tfoot><tr><td>total</td><td></td><td class="n">'
        f'{sum(layer.operations for layer in layers):,}</td><td class="n">{moved:,}</td>'
        f'<td></td><td class="n">{total * 1e6:,.1f}</td><td></td><td></td></tr></tfoot>'
        "</table></div>",
    ]


def _row(layer: LayerEstimate, longest: float, total: float) -> str:
    operator = layer.operator.rpartition(".")[2]
    head = (
        f'<tr><td class="path">{escape(layer.path)}</td>'
        f'<td title="{escape(layer.operator)}">{escape(operator)}</td>'
        f'<td class="n">{layer.operations:,}</td>'
    )
    if layer.fused_into and not layer.seconds:
        with_it = f'<td class="soft" colspan="5">computed with {escape(layer.fused_into)}</td>'
        return f"{head}{with_it}</tr>"
    if not layer.seconds:
        return f'{head}<td class="soft" colspan="5">costs the BPU nothing</td></tr>'
    bars = "".join(
        f'<div class="bar {kind}" style="width:{100 * cost / longest:.2f}%"></div>'
        for kind, cost in (("compute", layer.compute_seconds), ("memory", layer.memory_seconds))
        if cost
    )
    return (
        f'{head}<td class="n">{layer.loaded_bytes + layer.stored_bytes:,}</td>'
        f'<td class="n">{layer.intensity:,.1f}</td><td class="n">{layer.seconds * 1e6:,.1f}</td>'
        f'<td class="n">{100 * layer.seconds / total:.1f} %</td><td class="bars">{bars}</td></tr>'
    )


def _sources(figures: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, figure in figures.items():
        if isinstance(figure, Mapping) and name in _FIGURES:  # a CPU's tell nothing here
            source = escape(str(figure["source"]))
            rows.append(
                f"<tr><td>{escape(_FIGURES[name])}</td>"
                f'<td class="n">{figure["value"]:g}</td><td>{escape(figure["basis"])}</td>'
                f'<td>{escape(figure["note"])}<br><a href="{source}">{source}</a></td></tr>'
            )
    return [
        "<h2>What it rests on</h2>",
        f'<div class="soft">{escape(str(figures["chip"]))}</div><div class="scroll"><table><thead>'
        '<tr><th>figure</th><th class="n">value</th><th>basis</th><th>what its source says</th>'
        "</tr></thead><tbody>",
        *rows,
        "</tbody></table></div>",
    ]


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
    given = locals()
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
