"""The five lines at the end of `ptq` and `demo`: is the quantized model good, and where to look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bev_data.tables import finite

if TYPE_CHECKING:
    from bevfusion_quant.any_model import AnyResult
    from bevfusion_quant.ptq import PtqResult
    from bevquant_export import DetectorExport


def verdict(result: PtqResult | AnyResult) -> tuple[str, ...]:
    """Boxes kept, worst layer, sizes, files, page: a line each, without what the run lacks."""
    lines = [
        ("Boxes", _boxes(result)),
        ("Worst layer", _worst_layer(result)),
        ("Weights", _size(result)),
        ("Files", _files(result)),
        ("Open", str((result.folder / "report.html").absolute())),
    ]
    return tuple(f"{title:<12} {text}" for title, text in lines if text)


def _boxes(result: PtqResult | AnyResult) -> str:
    simulation = result.simulation
    rows = simulation.agreement if simulation is not None else getattr(result, "agreement", ())
    form = "fake-quantized" if simulation is None else "in integers"
    near = next((row for row in rows if row.distance == 1.0), None)
    if near is None:
        return ""
    text = f"{near.matched} of {near.float_detections} float boxes kept {form} (same class, 1 m)"
    labels = simulation.found if simulation is not None else getattr(result, "labels_found", ())
    found = next((row for row in labels if row.distance == 1.0), None)
    if found is None:
        return text
    return (
        f"{text}; labels found: float {found.found_float} of {found.labels}, "
        f"quantized {found.found_quantized}"
    )


def _worst_layer(result: PtqResult | AnyResult) -> str:
    known = [
        (decibels, row.layer)
        for row in result.layers
        if (decibels := finite(row.sqnr_db)) is not None
    ]
    if not known:
        return ""
    decibels, layer = min(known)
    return f"{layer}, {decibels:.1f} dB SQNR (fake-quantized against float)"


def _size(result: PtqResult | AnyResult) -> str:
    if result.weights is None:
        return ""
    simulation = result.simulation
    if simulation is None or not simulation.operations:
        return str(result.weights)
    share = f"{100 * simulation.integer_share:.1f} % in integers"
    return f"{result.weights}; {simulation.operations / 1e9:.2f} G operations a frame, {share}"


def _files(result: PtqResult | AnyResult) -> str:
    written = getattr(result, "files", None)
    if written is not None:
        names = [one.path.name for one in (written.sparse, written.dense) if one is not None]
        return f"{', '.join(names)} for {written.target}, {_checked(written)}"
    exported = getattr(result, "exported", None)
    if exported is None:
        return ""
    if exported.failures:
        return f"{len(exported.files)} written, NOT verified: {exported.failures[0]}"
    compared = sum(layer.elements for layer in exported.layers if layer.different is not None)
    wrong = sum(file.unexplained for file in exported.files)
    return (
        f"{len(exported.files)} for {exported.target} verified: {compared:,} values compared, "
        f"{wrong:,} unexplained differences"
    )


def _checked(written: DetectorExport) -> str:
    """Integers of the two files that were compared with the integer model's, over all frames."""
    pairs = [pair for check in written.checks for pair in (check.layers, check.tensors)]
    if not pairs:
        return "NOT run"
    different, compared = (sum(column) for column in zip(*pairs, strict=True))
    return f"verified: {compared:,} values compared, {different:,} differ"
