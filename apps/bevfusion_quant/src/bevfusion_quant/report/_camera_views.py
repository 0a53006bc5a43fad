"""The cameras' pictures as they sit on the car, boxes projected into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from bevfusion_quant.report._birds_eye import box_title
from bevfusion_quant.report._boxes import corners, wire_frame
from bevfusion_quant.report._encode import jpeg_uri
from bevfusion_quant.report._html import Html, tag

if TYPE_CHECKING:
    from bev_data.cameras import Camera
    from bevfusion_quant.report._content import ReportBoxes, ReportScene

__all__ = ["arranged", "camera_views"]

WIDTH = 800
GRID = (
    "CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT",
)  # fmt: skip


def arranged(names: Sequence[str]) -> list[int]:
    """Indices of cameras as they are shown: front left to right, then back, then any other."""
    place = {name: index for index, name in enumerate(GRID)}
    return sorted(range(len(names)), key=lambda i: (place.get(names[i], len(GRID)), i))


def camera_views(scene: ReportScene, present: Mapping[str, ReportBoxes]) -> Html:
    """One figure for each camera."""
    order = arranged([camera.name for camera in scene.cameras])
    figures = [_view(scene.cameras[index], present) for index in order]
    return tag("div", *figures, class_="cameras")


def _view(camera: Camera, present: Mapping[str, ReportBoxes]) -> Html:
    height, width = camera.image.shape[:2]
    uri, shown_width, shown_height = jpeg_uri(camera.image, WIDTH)
    drawn = [box for kind, boxes in present.items() for box in _frames(kind, boxes, camera)]
    name = camera.name.removeprefix("CAM_").replace("_", " ").lower()
    picture = tag(
        "img", src=uri, width=shown_width, height=shown_height, alt=f"Picture of camera {name}",
        decoding="async",
    )  # fmt: skip
    drawing = tag(
        "svg", *drawn, viewBox=f"0 0 {width} {height}", role="img",
        aria_label=f"{len(drawn)} boxes in camera {name}",
    )  # fmt: skip
    enlarge = tag(
        "button",
        "Enlarge",
        type="button",
        aria_pressed="false",
        aria_label=f"Enlarge camera {name}",
    )
    return tag(
        "figure",
        tag("div", picture, drawing, class_="stack", style=f"aspect-ratio:{width}/{height}"),
        tag("figcaption", name, enlarge),
    )


def _frames(kind: str, boxes: ReportBoxes, camera: Camera) -> Iterator[Html]:
    for index, eight in enumerate(corners(boxes.boxes)):
        lines = wire_frame(eight, camera)
        if not lines:
            continue
        path = "".join(f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" for a, b in lines)
        score = None if boxes.scores is None else f"{float(boxes.scores[index]):.3f}"
        yield tag(
            "g",
            tag("title", box_title(kind, boxes, index)),
            tag("path", d=path),
            class_=f"box {kind}",
            data_score=score,
        )
