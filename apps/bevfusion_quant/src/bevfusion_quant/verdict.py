"""The five lines at the end of `ptq` and `demo`: quality of the quantized model, and next steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bevfusion.quantization import short_path
from bevfusion_quant.pages._content import known_levels, unusable
from bevfusion_quant.pages._format import decibels, macs

if TYPE_CHECKING:
    from bevfusion_quant.ptq import PtqResult


def verdict(result: PtqResult, *, folded: bool = True) -> tuple[str, ...]:
    """One line each: boxes kept, worst layer, sizes, files, page. Missing results have no line."""
    lines = [
        ("Result", unusable(result.layers, result.agreement, result.remedy)),
        ("Boxes", _boxes(result)),
        ("Worst layer", _worst_layer(result)),
        ("Weights", _size(result)),
        ("Files", _files(result, folded)),
        ("Open", str((result.folder / "report.html").absolute())),
    ]
    return tuple(f"{title:<12} {text}" for title, text in lines if text)


def _boxes(result: PtqResult) -> str:
    simulation = result.simulation
    rows = result.agreement if simulation is None else simulation.agreement
    form = "fake-quantized" if simulation is None else "in integers"
    near = next((row for row in rows if row.distance == 1.0), None)
    if near is None:
        return ""
    text = f"{near.matched} of {near.float_detections} float boxes kept {form} (same class, 1 m)"
    labels = result.labels_found if simulation is None else simulation.found
    found = next((row for row in labels if row.distance == 1.0), None)
    if found is None:
        return text
    return (
        f"{text}; labels found: float {found.found_float} of {found.labels}, "
        f"quantized {found.found_quantized}"
    )


def _worst_layer(result: PtqResult) -> str:
    known = known_levels(result.layers)
    if not known:
        return ""
    level, layer = min(known)
    return f"{short_path(layer)}, {decibels(level)} SQNR (fake-quantized against float)"


def _size(result: PtqResult) -> str:
    if result.weights is None:
        return ""
    simulation = result.simulation
    size = f"{'random, so boxes mean nothing; ' * result.random_weights}{result.weights}"
    if simulation is None or not simulation.operations:
        return size
    share = f"{100 * simulation.integer_share:.1f} % in integers"
    return f"{size}; {macs(simulation.operations)} a frame, {share}"


def _files(result: PtqResult, folded: bool) -> str:
    exported = result.exported
    if exported is None:
        refused = result.refused or ("" if folded else "they need folded batch norms")
        later = f"none yet; to write and verify them: bevfusion-quant export --run {result.folder}"
        return f"none: {refused}" if refused else later
    if exported.failures:
        return f"{len(exported.files)} written, NOT verified: {exported.failures[0]}"
    compared = sum(layer.elements for layer in exported.layers if layer.different is not None)
    wrong = sum(file.unexplained for file in exported.files)
    return (
        f"{len(exported.files)} for {exported.target} verified: {compared:,} values compared, "
        f"{wrong:,} unexplained differences"
    )
