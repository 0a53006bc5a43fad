"""`python -m bev_scenes [folder] [seed]` writes two pictures of a scene.

The LiDAR's points from above and behind, and the six cameras.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bev_data.boxes import BOX_EDGES, box_corners
from bev_data.points import Frame
from bev_scenes._frame import street_frame
from bev_scenes._rig import RIGS

_Array = npt.NDArray[np.float64]
_NIGHT, _PALE = "#0d1117", "#c9d1d9"
_ROWS = (
    ("CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT"),
    ("CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT"),
)
_COLOURS = {
    "car": "#58a6ff",
    "truck": "#d2a8ff",
    "bus": "#d2a8ff",
    "trailer": "#d2a8ff",
    "construction_vehicle": "#d2a8ff",
    "pedestrian": "#ff7b72",
    "bicycle": "#f2cc60",
    "motorcycle": "#f2cc60",
    "barrier": "#8b949e",
    "traffic_cone": "#8b949e",
}
_EYE, _DOWN_BY, _FOCAL = np.array([0.0, -27.0, 15.0]), 0.36, 1.25


def draw_scene(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write `scene_lidar.png` and `scene_cameras.png` of a street.

    Args:
        folder: where to.
        seed: of the street.

    Returns:
        the two files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("drawing a scene needs matplotlib: pip install matplotlib") from error
    # Rendered at twice the size that is shown: the mean of four rays smooths every edge.
    frame = street_frame(seed, cameras=RIGS["nuscenes"].resized(1280, 720))
    return _lidar(frame, folder / "scene_lidar.png"), _cameras(frame, folder / "scene_cameras.png")


def _cameras(frame: Frame, path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    images = {
        camera.name: camera.image.reshape(360, 2, 640, 2, 3).mean((1, 3)).astype(np.uint8)
        for camera in frame.cameras
    }
    figure = Figure(figsize=(19.36, 7.28), facecolor="white")
    for row, names in enumerate(_ROWS):
        for column, name in enumerate(names):
            place = (column * 648 / 1936, (1 - row) * 368 / 728, 640 / 1936, 360 / 728)
            axes = figure.add_axes(place)
            axes.imshow(images[name], interpolation="nearest")
            axes.set_axis_off()
            axes.text(
                10, 14, name, color="white", fontsize=11, va="top", family="DejaVu Sans",
                bbox={"facecolor": "black", "alpha": 0.45, "edgecolor": "none", "pad": 3},
            )  # fmt: skip
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    return path


def _lidar(frame: Frame, path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    assert frame.points is not None
    assert frame.labels is not None
    figure = Figure(figsize=(16, 8), facecolor=_NIGHT)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-1.0, 1.0)
    axes.set_ylim(-0.58, 0.42)
    spot, depth = _look(frame.points[:, :3].astype(np.float64))
    order = np.argsort(-depth)
    order = order[depth[order] > 3.0]
    height = frame.points[order, 2]
    axes.scatter(
        spot[order, 0], spot[order, 1], c=height, cmap="turbo", vmin=-2.4, vmax=6.0, linewidths=0,
        s=np.clip(90.0 / depth[order], 0.4, 5.0),
    )  # fmt: skip
    corners = box_corners(frame.labels.boxes.astype(np.float64))
    for name, eight in zip(frame.labels.names, corners, strict=True):
        spots, far = _look(eight)
        if far.min() > 3.0:
            lines = [spots[list(edge)] for edge in BOX_EDGES]
            width = float(np.clip(40.0 / far.mean(), 0.5, 1.6))
            axes.add_collection(LineCollection(lines, colors=_COLOURS[name], linewidths=width))
    shown: dict[str, list[str]] = {}
    for name in _COLOURS:
        if name in frame.labels.names:
            shown.setdefault(_COLOURS[name], []).append(name.replace("_", " "))
    legend = axes.legend(
        [Line2D([], [], color=colour, linewidth=2) for colour in shown],
        [", ".join(names) for names in shown.values()],
        loc="lower left", facecolor=_NIGHT, edgecolor="none", framealpha=0.85, labelcolor=_PALE,
        fontsize=11, borderaxespad=0.0, borderpad=0.9,
    )  # fmt: skip
    legend.set_zorder(5)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120, facecolor=_NIGHT, metadata={"Software": None})
    return path


def _look(places: _Array) -> tuple[_Array, _Array]:
    """Positions in the picture and depths [m], from behind and above the scanner."""
    c, s = np.cos(_DOWN_BY), np.sin(_DOWN_BY)
    x, y, z = (places - _EYE).T
    depth = y * c - z * s
    safe = np.maximum(depth, 0.1)
    return np.stack([_FOCAL * x / safe, _FOCAL * (z * c + y * s) / safe], 1), depth


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
    folder.mkdir(parents=True, exist_ok=True)
    for path in draw_scene(folder, int(sys.argv[2]) if len(sys.argv) > 2 else 0):
        print(path)
