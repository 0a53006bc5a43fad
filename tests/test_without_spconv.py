"""A sparse network from float to files, with spconv and in a process without it: equal results."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import nn


def blocks(spconv: Any) -> Any:
    """A residual block, whose base class is spconv's."""

    class Block(spconv.SparseModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv1 = spconv.SubMConv3d(width, width, 3, bias=False, indice_key="subm")
            self.bn1 = nn.BatchNorm1d(width)
            self.conv2 = spconv.SubMConv3d(width, width, 3, bias=False, indice_key="subm")
            self.bn2 = nn.BatchNorm1d(width)
            self.relu = nn.ReLU()

        def forward(self, x: Any) -> Any:
            out = self.conv1(x)
            out = out.replace_feature(self.relu(self.bn1(out.features)))
            out = self.conv2(out)
            out = out.replace_feature(self.bn2(out.features) + x.features)
            return out.replace_feature(self.relu(out.features))

    return Block


def network(spconv: Any) -> Any:
    torch.manual_seed(0)
    net = spconv.SparseSequential(
        spconv.SubMConv3d(5, 16, 3, padding=1, bias=False, indice_key="subm"),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        blocks(spconv)(16),
        spconv.SparseConv3d(16, 32, 3, stride=2, padding=1, bias=False, indice_key="down"),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        spconv.SparseConv3d(32, 16, (3, 1, 1), stride=(2, 1, 1), bias=False),
    ).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return net


def frame(spconv: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    occupied = torch.rand(1, 10, 20, 20, generator=generator) < 0.1
    indices = occupied.nonzero().int().contiguous()
    features = torch.randn(len(indices), 5, generator=generator)
    return spconv.SparseConvTensor(features, indices, [10, 20, 20], 1)


def tensors(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates in one order, and features."""
    order = sorted(range(len(x.indices)), key=x.indices.tolist().__getitem__)
    return x.indices[order], x.features.detach()[order]


def results() -> dict[str, Any]:
    """What a user gets: the float model on spconv's own kernels, the integer one, the files."""
    from bevquant_export import export_sparse_onnx
    from bevquant_fusion import fuse_model
    from bevquant_int8sim import simulate
    from bevquant_qnn import quantize_model
    from bevquant_quantizers import calibrate
    from bevquant_sparse import use_bevquant_kernels

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecations in spconv's own import
        import spconv.pytorch as spconv
    torch.set_num_threads(1)
    net = network(spconv)
    made: dict[str, Any] = {"spconv": hasattr(sys.modules["spconv"], "STANDIN")}
    made["state"] = net.state_dict()
    with torch.no_grad():
        made["float"] = tensors(net(frame(spconv, 9)))
    made["changed"] = use_bevquant_kernels(net)
    fused = fuse_model(net, frame(spconv, 0))
    made["fused"] = [str(pair) for pair in fused.fused]
    model = quantize_model(fused.model, example_inputs=frame(spconv, 0)).model
    calibrate(model, [frame(spconv, seed) for seed in range(2)])
    integer = simulate(model, frame(spconv, 0))
    made["integer"] = tensors(integer(frame(spconv, 9)))
    with tempfile.TemporaryDirectory() as folder:
        for dialect in ("libspconv", "portable"):
            path = Path(folder) / f"{dialect}.onnx"
            export_sparse_onnx(model, frame(spconv, 0), path, dialect=dialect)
            made[dialect] = path.read_bytes()
    return made


class WithoutSpconv(PathFinder):
    """The finder of a machine on which spconv is not installed."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name == "spconv" else super().find_spec(name, path, target)


def test_results_are_equal(spconv_numbers: Any, tmp_path: Path) -> None:
    saved = tmp_path / "made.pt"
    # The file's own imports are the finder's: spconv cannot be found in that process.
    subprocess.run([sys.executable, "-W", "ignore", __file__, str(saved)], check=True)
    found = torch.load(saved, weights_only=True)
    expected = results()
    assert (found.pop("spconv"), expected.pop("spconv")) == (True, False)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found["state"][key], expected["state"][key]) for key in found["state"])
    assert torch.equal(found["float"][0], expected["float"][0])
    torch.testing.assert_close(found["float"][1], expected["float"][1], rtol=1e-6, atol=1e-6)
    for name in ("changed", "fused", "libspconv", "portable"):
        assert found[name] == expected[name], name
    assert all(map(torch.equal, found["integer"], expected["integer"]))
    assert found["integer"][1].any()


if __name__ == "__main__":
    sys.meta_path = [WithoutSpconv if f is PathFinder else f for f in sys.meta_path]
    from bevquant_sparse import use_standin

    use_standin()
    torch.save(results(), sys.argv[1])
