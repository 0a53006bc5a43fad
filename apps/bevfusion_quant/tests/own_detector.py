"""A detector as a user has it: own code around spconv, points in, boxes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bev_data.boxes import Detections
from bev_data.points import Frame
from bevfusion.frameworks import ForeignDetector
from bevquant_sparse import use_bevquant_kernels

GRID = (4, 32, 32)
CLASSES = ("car", "pedestrian")


class Detector(nn.Module):
    """Voxels of 3.2 m to a heat map of two classes."""

    def __init__(self) -> None:
        import spconv.pytorch as spconv  # not before a test asks for it

        super().__init__()
        torch.manual_seed(0)
        self.encoder = spconv.SparseSequential(
            spconv.SubMConv3d(4, 16, 3, padding=1, bias=False, indice_key="subm"),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            spconv.SparseConv3d(16, 32, 3, stride=(2, 1, 1), padding=1, bias=False),
            nn.BatchNorm1d(32),
            nn.ReLU(),
        )
        self.neck = nn.Sequential(
            nn.Conv2d(64, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.head = nn.Conv2d(32, len(CLASSES), 1)

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        import spconv.pytorch as spconv

        x = self.encoder(spconv.SparseConvTensor(features, coords, GRID, 1)).dense()
        return self.head(self.neck(x.flatten(1, 2)))


def arguments(frame: Frame) -> tuple[Tensor, Tensor]:
    assert frame.points is not None
    cells = np.floor((frame.points[:, [2, 1, 0]] + [4, 51.2, 51.2]) / [2, 3.2, 3.2]).astype(int)
    inside = ((cells >= 0) & (cells < GRID)).all(1)
    unique, owner = np.unique(cells[inside], axis=0, return_inverse=True)
    sums = np.zeros((len(unique), 4), np.float32)
    np.add.at(sums, owner.reshape(-1), frame.points[inside, :4])
    counts = np.bincount(owner.reshape(-1))[:, None]
    coords = np.concatenate([np.zeros((len(unique), 1), int), unique], 1)
    scale = np.float32([50, 50, 4, 255])
    return torch.from_numpy(sums / counts / scale).float(), torch.from_numpy(coords).int()


def boxes(heatmap: Any, frame: Frame) -> Detections:
    scores, cells = heatmap[0].detach().flatten().sigmoid().topk(20)
    y, x = (cells % 1024) // 32, cells % 32
    rows = torch.zeros(20, 7)
    rows[:, 0], rows[:, 1] = (x + 0.5) * 3.2 - 51.2, (y + 0.5) * 3.2 - 51.2
    rows[:, 3:6] = torch.tensor([4.0, 2.0, 1.5])
    return Detections(
        rows.numpy(), scores.numpy(), (cells // 1024).numpy(), np.zeros((20, 2), np.float32)
    )


def make() -> ForeignDetector:
    model = Detector().eval()
    use_bevquant_kernels(model)
    return ForeignDetector(model, arguments, boxes, CLASSES)


class BestCells(Detector):
    """Logits of the cells with the highest scores, best first."""

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        heatmap = super().forward(features, coords).flatten(2).transpose(1, 2)
        cells = heatmap.amax(2).topk(100, 1)[1]
        return heatmap.gather(1, cells[..., None].expand(-1, -1, 2))


def best_cells() -> Any:
    model = BestCells().eval()
    use_bevquant_kernels(model)
    return model, arguments


def unnamed_classes() -> Any:
    return replace(make(), classes=(), notes=("the network has no camera branch",))


def without_boxes() -> Any:
    made = make()
    return made.network, made.arguments


def wrong() -> Any:
    return "a model"


def raises() -> Any:
    raise RuntimeError("no weights")


def nothing() -> None:
    """A function that forgets to return."""


def without_values() -> Any:
    return Detector().eval().to("meta"), arguments


def compiled() -> Any:
    return torch.compile(Detector().eval(), backend="eager"), arguments


def failing_forward() -> Any:
    class Failing(Detector):
        def forward(self, features: Tensor, coords: Tensor) -> Tensor:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    return Failing(), arguments, boxes


def failing_arguments() -> Any:
    return Detector(), lambda frame: ({}["lidar"],), boxes


def list_of_arguments() -> Any:
    return Detector(), lambda frame: torch.from_numpy(frame.points), boxes


def short_boxes() -> Any:
    def cut(heatmap: Any, frame: Frame) -> Detections:
        found = boxes(heatmap, frame)
        return found._replace(scores=found.scores[:3])

    return make().network, arguments, cut


def class_too_high() -> ForeignDetector:
    def others(heatmap: Any, frame: Frame) -> Detections:
        return boxes(heatmap, frame)._replace(labels=np.arange(20) % 10)

    return ForeignDetector(make().network, arguments, others, CLASSES)


class Wrapped(nn.Module):
    """Another end behind the detector."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.inner, self.end = make().network, end

    def forward(self, features: Tensor, coords: Tensor) -> Any:
        return self.end(self.inner(features, coords))


def text() -> Any:
    return Wrapped(str).eval(), arguments


def without_form() -> Any:
    """An operator without a form in files."""
    return Wrapped(lambda x: torch.linalg.svd(x[0, 0])[1]).eval(), arguments


class Pillars(nn.Module):
    """A pillar encoder by the name of its layers, in front of a dense network."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.pfn_layers = nn.ModuleList([nn.Linear(4, 8)])
        self.neck = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, points: Tensor) -> Tensor:
        return self.neck(self.encoder.pfn_layers[0](points).T.reshape(1, 8, 32, 32))


def pillars() -> Any:
    return Pillars().eval(), lambda frame: (torch.from_numpy(frame.points[:1024, :4]),)


class Chooses(Pillars):
    """Python decides by a value, which no graph follows."""

    def forward(self, points: Tensor) -> Tensor:
        x = super().forward(points)
        return x * 2 if x.sum() > 0 else x


def chooses() -> Any:
    return Chooses().eval(), pillars()[1]


def no_layers() -> Any:
    return nn.ReLU(), pillars()[1]


def numpy_arguments() -> Any:
    return Pillars(), lambda frame: (frame.points[:1024, :4],)


def faint_first_frame() -> Any:
    """The first frame's values are a hundredth of the others'."""

    def given(frame: Frame) -> tuple[Tensor]:
        torch.manual_seed(0)
        scale = 0.01 if frame.name == "street_0" else 1.0
        return (scale * torch.randn(1, 3, 8, 8),)

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)]
    return nn.Sequential(*layers).eval(), given


def collapsing_layer() -> Any:
    """The second layer reads a large channel that it does not use."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
    with torch.no_grad():
        first.weight[0] *= 3000
        second.weight[:, 0] = 0
    layers = [first, second, nn.ReLU(), nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Conv2d(64, 4, 1)]

    def given(frame: Frame) -> tuple[Tensor]:
        return (torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(len(frame.name))),)

    return nn.Sequential(*layers).eval(), given


def one_value() -> Any:
    """Calibration frames that are empty but for one value."""

    def constant(frame: Frame) -> tuple[Tensor, Tensor]:
        features, coords = arguments(frame)
        return torch.zeros_like(features), coords

    return make().network, constant, boxes
