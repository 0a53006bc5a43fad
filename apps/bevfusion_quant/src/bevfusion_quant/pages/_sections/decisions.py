"""Folded, shared and float layers, and warnings of the calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bevfusion_quant.pages._content import ReportContent
from bevfusion_quant.pages._page import Section

ORDER = 90
Record = Mapping[str, Any]
HOW = {
    "identity": "an Identity stands in its place",
    "removed": "taken out of its container",
    "rebuilt": "its block was rebuilt without it",
}


def section(content: ReportContent) -> Section | None:
    """Collapsible lists with one search over all of them."""
    lists = list(_lists(content))
    return Section("decisions", "Decisions", lists) if lists else None


def _lists(content: ReportContent) -> Iterator[Record]:
    fusion, quantization = content.fusion, content.quantization
    if content.calibration is not None:
        yield _list("warnings", "Calibration warnings", _warnings(content.calibration), opens=True)
    if quantization is not None:
        left = (_reason(item, "path") for item in quantization.get("skipped", ()))
        yield _list("left", "Left in float, or worth a note", left, opens=True)
        shared = (_shared(item) for item in quantization.get("shared", ()))
        yield _list("shared", "Quantizers shared", shared)
    if fusion is not None:
        kept = (_reason(item, "bn") for item in fusion.get("skipped", ()))
        yield _list("kept", "Batch norms not folded", kept, opens=True)
        change = fusion.get("largest_relative_change")
        note = "" if change is None else f"Largest relative change of the output: {change:.2g}."
        folded = (_fused(item) for item in fusion.get("fused", ()))
        yield _list("fused", "Batch norms folded", folded, note)
    if quantization is not None:
        done = (_quantized(item) for item in quantization.get("quantized", ()))
        yield _list("quantized", "Modules quantized", done)


def _list(
    name: str, title: str, entries: Iterator[Record], note: str = "", opens: bool = False
) -> Record:
    """A list; open if it holds entries that a reader should see."""
    found = list(entries)
    opened = opens and bool(found)
    return {"name": name, "title": title, "note": note, "open": opened, "entries": found}


def _entry(search: str, paths: tuple[str, ...] = (), **texts: str) -> Record:
    """Paths, then `text` below them; `tensor` after it; or a pair of paths in one line, `said`."""
    return {"search": search.lower(), "paths": paths, **texts}


def _warnings(calibration: Record) -> Iterator[Record]:
    for text in calibration.get("warnings", ()):
        yield _entry(text, text=text)
    for found in calibration.get("findings", ()):
        place = f"{found.get('tensor')}, {found.get('frame')}"
        kind = ("poor: " if found.get("poor") else "") + str(found.get("kind"))
        text = f"{kind}: {found.get('evidence')}; {found.get('remedy')}"
        yield _entry(f"{place} {text}", (place,), text=text)
    for quantizer in calibration.get("quantizers", ()):
        name = ", ".join(quantizer.get("names", ()))
        for text in quantizer.get("warnings", ()):
            yield _entry(f"{name} {text}", (name,), text=text)


def _reason(item: Record, key: str) -> Record:
    path, reason = str(item.get(key) or "(model)"), str(item.get("reason", ""))
    return _entry(f"{path} {reason}", (path,), text=reason)


def _shared(item: Record) -> Record:
    readers, reason = tuple(map(str, item.get("readers", ()))), str(item.get("reason", ""))
    tensor = str(item.get("tensor", ""))
    return _entry(" ".join((*readers, reason, tensor)), readers, text=reason, tensor=tensor)


def _fused(item: Record) -> Record:
    conv, bn, how = (str(item.get(key, "")) for key in ("conv", "bn", "how"))
    return _entry(f"{conv} {bn} {how}", (conv, bn), said=HOW.get(how, how))


def _quantized(item: Record) -> Record:
    path, kind, was = (str(item.get(key, "")) for key in ("path", "kind", "was"))
    return _entry(f"{path} {was} {kind}", (path,), said=f"{was} → {kind}")
