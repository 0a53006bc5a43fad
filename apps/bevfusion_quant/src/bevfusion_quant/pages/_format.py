"""Names, amounts, arrays, pictures and boxes as text inside a page.

Arrays and pictures are small, and the same for the same input. Names and amounts are those that
`bev_data.tables` does not have.
"""

from __future__ import annotations

import base64
import io
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from bev_data.boxes import box_corners
from bev_data.cameras import Camera, wire_frame
from bev_data.tables import DASH, finite
from bevfusion.centerpoint import CenterPoint
from bevfusion_quant.pages._content import Extent, ReportBoxes

_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{ svg \{(.*?)\} \}", re.DOTALL)
_COLOUR = re.compile(r"(--[\w-]+):(#[0-9a-fA-F]+)")
# How many leading parts of a path name where in the model it is, not what it is.
_STEMS = {"encoders": 3, "decoder": 2, "heads": 2}
_PARTS = {
    "heads": "head",
    **{path: part for part, paths in CenterPoint.part_paths.items() for path in paths},
}


def matched_note(matched: tuple[int, int, int] | None) -> str:
    """Objects that both models choose, of those behind a row (`LayerRow.matched`).

    Examples:
        >>> matched_note((158, 160, 160)), matched_note(None)
        ('158 of 160 objects matched', '')
    """
    return "" if matched is None else f"{matched[0]:,} of {matched[2]:,} objects matched"


def decibels(value: float | None, cosine: float | None = None) -> str:
    """An SQNR; "equal" where the cosine says that there is no noise.

    Examples:
        >>> decibels(26.52), decibels(None, 1.0), decibels(None), decibels(-math.inf)
        ('26.5 dB', 'equal', '–', '−∞ dB')
    """
    if value == -math.inf:
        return "−∞ dB"
    if finite(value) is not None:
        return f"{value:.1f} dB"
    return "equal" if cosine is not None and abs(cosine - 1) < 1e-9 else DASH


def macs(count: int) -> str:
    """An amount of multiply-accumulates.

    Examples:
        >>> macs(1_970_000_000), macs(346_200), macs(0)
        ('1.97 GMAC', '346 kMAC', '0 MAC')
    """
    unit = min((len(str(count)) - 1) // 3, 3)
    amount = count / 1000**unit
    digits = f"{amount:,.0f}" if amount >= 100 or not unit else f"{amount:.3g}"
    return f"{digits} {('', 'k', 'M', 'G')[unit]}MAC"


def seconds(value: float) -> str:
    """A duration."""
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def memory(mib: float) -> str:
    """An amount of memory given in MiB."""
    return f"{mib:,.0f} MiB" if mib < 10_000 else f"{mib / 1024:.1f} GiB"


def part_of(path: str) -> str:
    """The part of the model that a path lies in.

    Examples:
        >>> part_of("encoders.camera.neck.0"), part_of("fuser.0"), part_of("heads.object.x")
        ('camera', 'fuser', 'head')
        >>> part_of("pts_neck.deblocks.0")
        'decoder'
    """
    first, *rest = path.split(".")
    if first == "encoders" and rest:
        return rest[0]
    return _PARTS.get(first, first)


def path_parts(path: str) -> tuple[str, str]:
    """Where in the model a path lies, and what lies there.

    Examples:
        >>> path_parts("encoders.camera.neck.0"), path_parts("fuser.0")
        (('encoders.camera.neck.', '0'), ('', 'fuser.0'))
    """
    parts = path.split(".")
    cut = min(_STEMS.get(parts[0], 0), len(parts) - 1)
    return "".join(f"{part}." for part in parts[:cut]), ".".join(parts[cut:])


def breakable(text: str) -> list[str]:
    """A name in pieces between which a line may break: after its dots and low lines."""
    return re.split(r"(?<=[._])(?=.)", text, flags=re.DOTALL)


def setting_text(value: object) -> str:
    """A setting as a cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {setting_text(part)}" for name, part in value.items()) or DASH
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or DASH
    return DASH if value is None else str(value)


def web_address(text: str) -> str:
    """An address that a link may lead to: one of the web, and no script."""
    if not text.startswith("https://"):
        raise ValueError(f"{text[:60]!r} is no https:// address")
    return text


def partition_picture(plan: str) -> Markup:
    """The picture of a plan for a BPU, in the page's light or dark instead of the system's.

    Args:
        plan: From `bevquant_hybrid.partition.Plan.to_json`; it is drawn anew.
    """
    from bevquant_hybrid.operators import load_support_table
    from bevquant_hybrid.partition import Plan

    read = Plan.from_json(plan)
    march = load_support_table().march(read.march).title
    return Markup(by_page_scheme(read.draw(title=f"Detector on CPU and BPU ({march})")))


def by_page_scheme(svg: str) -> str:
    """A picture whose colours follow the page's scheme, which a reader may choose."""
    found = _DARK.search(svg)
    if found is None:
        return svg
    dark = dict(_COLOUR.findall(found[1]))

    def both(match: re.Match[str]) -> str:
        name, light = match[1], match[2]
        return f"{name}:light-dark({light},{dark.get(name, light)})"

    return _COLOUR.sub(both, svg[: found.start()]) + svg[found.end() :]


# Twelve bits: a step is a fortieth of a per cent of the map's range, finer than the readout.
LEVELS = 4095
EMPTY = 0xFFFF
JPEG_QUALITY = 80


def rounded(value: float, digits: int = 6) -> float:
    """A float to that many significant digits, so that JSON stays short."""
    return float(f"{float(value):.{digits}g}")


def rounded_or_none(value: float, digits: int = 6) -> float | None:
    """The same; None for NaN and infinity, which JSON does not know."""
    return rounded(value, digits) if np.isfinite(value) else None


def packed_map(values: npt.NDArray[np.floating[Any]]) -> dict[str, Any]:
    """A map in 4096 levels between its smallest and its largest value.

    `data` is base64 of zlib of the high bytes, then the low bytes, of uint16 in row order; cell
    i holds low + level·(high − low)/4095, or nothing where the level is 65535 (not finite).
    """
    known = np.isfinite(values)
    low = float(values[known].min()) if known.any() else 0.0
    high = float(values[known].max()) if known.any() else 0.0
    span = (high - low) or 1.0
    levels = np.full(values.shape, EMPTY, np.uint16)
    levels[known] = np.rint((values[known].astype(np.float64) - low) / span * LEVELS)
    planes = np.concatenate([levels >> 8, levels & 0xFF], axis=None).astype(np.uint8)
    rows, columns = values.shape
    return {
        "rows": rows,
        "columns": columns,
        "low": rounded(low, 8),
        "high": rounded(low + span, 8),
        "data": _packed(planes),
    }


def packed_shares(shares: npt.NDArray[np.floating[Any]]) -> dict[str, Any]:
    """A picture of one byte a cell: 0 is empty, 1 … 255 the shares 0 … 1; NaN is empty."""
    known = np.isfinite(shares)
    levels = np.zeros(shares.shape, np.uint8)
    levels[known] = np.rint(1 + np.clip(shares[known], 0, 1) * 254)
    return {"rows": shares.shape[0], "columns": shares.shape[1], "data": _packed(levels)}


def _packed(values: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode("ascii")


def jpeg(image: npt.NDArray[np.uint8], width: int) -> tuple[str, int, int]:
    """An RGB picture as base64 of JPEG, at most `width` pixels wide, and its width and height."""
    from PIL import Image

    picture = Image.fromarray(image)
    if picture.width > width:
        height = max(1, round(picture.height * width / picture.width))
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=JPEG_QUALITY, optimize=True)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return data, picture.width, picture.height


def from_above(
    extent: Extent, rings: range | tuple[int, ...], sets: Mapping[str, ReportBoxes]
) -> dict[str, Any]:
    """A drawing in metres, forward up: the car at (x, y), rings around it, footprints of boxes."""
    left, bottom, right, top = extent
    drawn = []
    for kind, boxes in sets.items():
        flat = box_corners(boxes.boxes)[:, :4, :2] * (1, -1) + (-left, top)
        for index, outline in enumerate(flat):
            front = (outline[0] + outline[3]) / 2
            around = "L".join(f"{x:.2f} {y:.2f}" for x, y in outline)
            x, y = outline.mean(0)
            # A line from a box's middle to its front shows its direction.
            line = f"M{around}zM{x:.2f} {y:.2f}L{front[0]:.2f} {front[1]:.2f}"
            drawn.append(_box(kind, boxes, index, line, boxes.names[index]))
    size = {"width": right - left, "height": top - bottom, "x": -left, "y": top}
    return {**size, "rings": rings, "boxes": drawn}


def in_camera(camera: Camera, sets: Mapping[str, ReportBoxes]) -> Iterator[dict[str, Any]]:
    """The wire frames, in pixels, of the boxes that touch a camera's picture."""
    for kind, boxes in sets.items():
        for index, eight in enumerate(box_corners(boxes.boxes)):
            lines = wire_frame(eight, camera)
            if len(lines):
                line = "".join(f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" for a, b in lines)
                yield _box(kind, boxes, index, line, "")


def _box(kind: str, boxes: ReportBoxes, index: int, line: str, name: str) -> dict[str, Any]:
    """A box, and what it says of itself: class, whose it is, score, distance."""
    score = None if boxes.scores is None else float(boxes.scores[index])
    score_text = "" if score is None else f", score {score:.2f}"
    far = float(np.hypot(*boxes.boxes[index][:2]))
    title = f"{boxes.names[index]} ({kind}{score_text}), {far:.1f} m away"
    return {"kind": kind, "title": title, "line": line, "score": score, "name": name}
