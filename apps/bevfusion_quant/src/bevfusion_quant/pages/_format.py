"""Names and amounts as a reader wants them, where `bev_data.tables` does not have them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from markupsafe import Markup

from bev_data.tables import DASH, finite
from bevfusion.centerpoint import CenterPoint

_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{ svg \{(.*?)\} \}", re.DOTALL)
_COLOUR = re.compile(r"(--[\w-]+):(#[0-9a-fA-F]+)")
# How many leading parts of a path name where in the model it is, not what it is.
_STEMS = {"encoders": 3, "decoder": 2, "heads": 2}
_PARTS = {
    "heads": "head",
    **{path: part for part, paths in CenterPoint.part_paths.items() for path in paths},
}


def decibels(value: float | None, cosine: float | None = None) -> str:
    """An SQNR; "equal" where the cosine says that there is no noise.

    Examples:
        >>> decibels(26.52), decibels(None, 1.0), decibels(None)
        ('26.5 dB', 'equal', '–')
    """
    if finite(value) is not None:
        return f"{value:.1f} dB"
    return "equal" if cosine is not None and abs(cosine - 1) < 1e-9 else DASH


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
    """An address that a link may lead to.

    Raises:
        ValueError: It is not one of the web, such as a script.
    """
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
