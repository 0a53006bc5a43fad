"""Inverses of small matrices, which camera geometry has in its forward and ONNX has not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from bevquant_export import compare_float_onnx, export_float_onnx
from bevquant_export.floats._plain_forms import plain_forms

pytest.importorskip("onnxscript", reason="the float extra is not installed")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_products_give_the_inverse(size: int) -> None:
    torch.manual_seed(size)
    a = torch.randn(50, 2, size, size, dtype=torch.float64)
    b = torch.randn(50, 2, size, 3, dtype=torch.float64)
    with plain_forms(18):
        made, solved = torch.inverse(a), torch.linalg.solve(a, b)
        for inverted in (torch.linalg.inv(a), a.inverse()):  # of another name, in the same form
            assert torch.equal(inverted, made)
        other = torch.linalg.solve(a, b.mT, left=False)
    condition = torch.linalg.cond(a)[..., None, None]
    for mine, theirs in (
        (made, torch.linalg.inv(a)),
        (solved, torch.linalg.solve(a, b)),
        (other, torch.linalg.solve(a, b.mT, left=False)),
    ):
        scale = theirs.abs().amax((-2, -1), keepdim=True)
        assert ((mine - theirs).abs() / (scale * condition)).max() < 1e-14


def test_larger_ones_and_vectors_are_torchs_own() -> None:
    a, b = torch.randn(5, 5) + 3 * torch.eye(5), torch.randn(2, 3)
    with plain_forms(18):
        assert torch.equal(torch.inverse(a), a.inverse())
        small = torch.eye(3).expand(2, 3, 3) * 2
        assert torch.equal(torch.linalg.solve(small, b), b / 2)


class Geometry(nn.Module):
    """Pixels and depths to ego coordinates, as view transforms do."""

    def forward(self, points: Tensor, intrinsics: Tensor, pose: Tensor) -> Tensor:
        rays = intrinsics.inverse().matmul(points)
        rays = torch.cat([rays, torch.ones_like(rays[:, :1])], 1)
        return torch.linalg.inv(pose).matmul(rays)[:, :3]


def cameras(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    intrinsics = torch.tensor([[1266.4, 0.0, 816.3], [0.0, 1266.4, 491.5], [0.0, 0.0, 1.0]])
    turn, _ = torch.linalg.qr(torch.randn(6, 3, 3, generator=generator))
    pose = torch.eye(4).repeat(6, 1, 1)
    pose[:, :3, :3], pose[:, :3, 3] = turn, torch.randn(6, 3, generator=generator)
    points = torch.rand(6, 3, 40, generator=generator) * torch.tensor([[1600.0], [900.0], [1.0]])
    return points, intrinsics.repeat(6, 1, 1), pose


def test_camera_geometry_in_a_file(tmp_path: Path) -> None:
    model = Geometry().eval()
    file = export_float_onnx(model, cameras(0), tmp_path / "geometry.onnx")
    assert max(row.relative for row in compare_float_onnx(file, model, cameras(1))) < 1e-5
    proto = onnx.load(file.path)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} <= {""}
    given = cameras(2)
    session = onnxruntime.InferenceSession(file.path, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    (made,) = session.run(None, {n: x.numpy() for n, x in zip(names, given, strict=True)})
    exact = model(*(x.double() for x in given)).numpy()
    assert np.abs(made - exact).max() < 1e-5 * np.abs(exact).max()


def test_a_large_one_is_refused_by_name(tmp_path: Path) -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.inverse(x)

    with pytest.raises(ValueError, match=r"export_float_onnx: .* Large: .*linalg"):
        export_float_onnx(Large().eval(), (torch.randn(5, 5),), tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())
