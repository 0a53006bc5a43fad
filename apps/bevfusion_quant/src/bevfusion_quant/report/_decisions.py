"""What was fused, shared, left in float, and what the calibration warns of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bevfusion_quant.report._html import Html, path_name, tag
from bevfusion_quant.report._section import Section, field

if TYPE_CHECKING:
    from bevfusion_quant.report._content import ReportContent

__all__ = ["decisions_section"]

Record = Mapping[str, Any]
HOW = {
    "identity": "an Identity stands in its place",
    "removed": "taken out of its container",
    "rebuilt": "its block was rebuilt without it",
}


def decisions_section(content: ReportContent) -> Section | None:
    """Collapsible lists, one search over all of them."""
    lists = list(_lists(content))
    if not lists:
        return None
    controls = tag(
        "div",
        field("Search", tag("input", type="search", id="decision-search", autocomplete="off",
                            placeholder="path or reason", spellcheck="false")),
        tag("output", id="decision-shown"),
        class_="controls",
    )  # fmt: skip
    return Section("decisions", "Decisions", tag("div", controls, *lists))


def _lists(content: ReportContent) -> Iterator[Html]:
    fusion, quantization = content.fusion, content.quantization
    if content.calibration is not None:
        warnings = list(_warnings(content.calibration))
        yield _list("warnings", "Calibration warnings", warnings, opened=bool(warnings))
    if quantization is not None:
        left = [_reason(item, "path") for item in quantization.get("skipped", ())]
        yield _list("left", "Left in float, or worth a note", left, opened=bool(left))
        shared = [_shared(item) for item in quantization.get("shared", ())]
        yield _list("shared", "Quantizers shared", shared)
    if fusion is not None:
        kept = [_reason(item, "bn") for item in fusion.get("skipped", ())]
        yield _list("kept", "Batch norms not folded", kept, opened=bool(kept))
        change = fusion.get("largest_relative_change")
        note = None if change is None else f"Largest relative change of the output: {change:.2g}."
        folded = [_fused(item) for item in fusion.get("fused", ())]
        yield _list("fused", "Batch norms folded", folded, note)
    if quantization is not None:
        done = [_quantized(item) for item in quantization.get("quantized", ())]
        yield _list("quantized", "Modules quantized", done)


def _list(
    name: str, title: str, items: Sequence[Html], note: str | None = None, opened: bool = False
) -> Html:
    summary = tag(
        "summary", tag("span", title), tag("span", str(len(items)), class_="count"),
    )  # fmt: skip
    body = tag("ul", *items) if items else tag("p", "None.", class_="note")
    more = tag("p", note, class_="note") if note else None
    return tag("details", summary, more, body, id=f"list-{name}", class_="decision", open=opened)


def _item(*content: Html, text: str) -> Html:
    return tag("li", *content, data_text=text.lower())


def _warnings(calibration: Record) -> Iterator[Html]:
    for text in calibration.get("warnings", ()):
        yield _item(tag("p", text), text=text)
    for found in calibration.get("findings", ()):
        place = f"{found.get('tensor')}, {found.get('frame')}"
        kind = ("poor: " if found.get("poor") else "") + str(found.get("kind"))
        text = f"{kind}: {found.get('evidence')}; {found.get('remedy')}"
        yield _item(tag("code", path_name(place)), tag("p", text), text=f"{place} {text}")
    for quantizer in calibration.get("quantizers", ()):
        name = ", ".join(quantizer.get("names", ()))
        for text in quantizer.get("warnings", ()):
            yield _item(tag("code", path_name(name)), tag("p", text), text=f"{name} {text}")


def _reason(item: Record, key: str) -> Html:
    path, reason = str(item.get(key) or "(model)"), str(item.get("reason", ""))
    return _item(tag("code", path_name(path)), tag("p", reason), text=f"{path} {reason}")


def _shared(item: Record) -> Html:
    readers, reason = [str(r) for r in item.get("readers", ())], str(item.get("reason", ""))
    tensor = str(item.get("tensor", ""))
    paths = [tag("code", path_name(reader)) for reader in readers]
    about = tag("p", reason, tag("span", f" Tensor: {tensor}", class_="note") if tensor else None)
    return _item(*paths, about, text=" ".join((*readers, reason, tensor)))


def _fused(item: Record) -> Html:
    conv, bn, how = (str(item.get(key, "")) for key in ("conv", "bn", "how"))
    into = tag("span", "takes", class_="note")
    said = tag("span", HOW.get(how, how), class_="note")
    pair = tag("p", tag("code", path_name(conv)), into, tag("code", path_name(bn)), said)
    return _item(pair, text=f"{conv} {bn} {how}")


def _quantized(item: Record) -> Html:
    path, kind, was = (str(item.get(key, "")) for key in ("path", "kind", "was"))
    change = tag("span", f"{was} → {kind}", class_="note")
    return _item(tag("p", tag("code", path_name(path)), change), text=f"{path} {was} {kind}")
