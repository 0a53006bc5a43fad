"""Names, shapes and operators that move values, in every profile's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevquant_export import compare_qdq_onnx, export_qdq_onnx
from bevquant_int8sim import IntegerModel, simulate

Fixture = Callable[..., Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(x) + x)


class Heads(nn.Module):
    """A shared block, called twice, and named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.block = Block()
        self.heads = nn.ModuleDict({"score": nn.Conv2d(4, 2, 1), "box": nn.Conv2d(4, 6, 1)})

    def forward(self, image: Tensor, prior: Tensor) -> dict[str, Any]:
        x = self.block(self.block(self.stem(image)))
        made = {name: head(x) for name, head in self.heads.items()}
        return {"score": made["score"].sigmoid(), "boxes": (made["box"], made["box"] * prior)}


def test_names_follow_modules_parameters_and_keys(calibrated: Fixture, tmp_path: Path) -> None:
    inputs = torch.randn(2, 3, 8, 8), torch.rand(2, 6, 8, 8)
    model = calibrated(Heads(), *inputs)
    file = export_qdq_onnx(model, inputs, tmp_path / "net.onnx")
    graph = onnx.load(file.path).graph
    assert [port.name for port in graph.input] == ["image", "prior"] == list(file.inputs)
    names = ["score", "boxes_0", "boxes_1"]
    assert [port.name for port in graph.output] == names == list(file.outputs)
    assert file.outputs["boxes_1"] == (2, 6, 8, 8)
    nodes = [node.name for node in graph.node]
    assert len(set(nodes)) == len(nodes)
    for name in ("stem.Conv", "block.conv.Conv", "block.conv.Conv_2", "heads.score.Conv"):
        assert name in nodes
    constants = [c.name for c in graph.initializer]
    # A module called twice has its weight in the file once.
    assert [name for name in constants if name.startswith("block.conv.weight")] == [
        "block.conv.weight_scale",
        "block.conv.weight",
    ]
    assert [line.split(":")[1].strip() for line in file.floats] == ["sigmoid", "mul"]


def test_names_may_be_given(calibrated: Fixture, run: Fixture, tmp_path: Path) -> None:
    inputs = torch.randn(1, 3, 8, 8), torch.rand(1, 6, 8, 8)
    model = calibrated(Heads(), *inputs)
    named = {"input_names": ["a", "b"], "output_names": ["s", "p", "q"]}
    file = export_qdq_onnx(model, inputs, tmp_path / "net.onnx", "onnxruntime", **named)
    assert list(file.inputs) == ["a", "b"]
    made, _ = run(file, *inputs)
    want = simulate(model, inputs)(*inputs)
    for y, w in zip(made, (want["score"], *want["boxes"]), strict=True):
        torch.testing.assert_close(y, w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
def test_the_same_model_gives_the_same_bytes(
    profile: str, calibrated: Fixture, tmp_path: Path
) -> None:
    inputs = torch.randn(1, 3, 8, 8), torch.rand(1, 6, 8, 8)
    model = calibrated(Heads(), *inputs)
    files = [
        export_qdq_onnx(model, inputs, tmp_path / name, profile).path for name in ("a.x", "b.x")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    onnx.checker.check_model(str(files[0]))


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime"])
def test_a_free_batch_runs_at_any_size(
    profile: str, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    class Cameras(nn.Module):
        """Images of several cameras, folded into the batch and unfolded again."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 2, 1)

        def forward(self, images: Tensor) -> Tensor:
            batch, cameras, channels, height, width = images.shape
            x = F.relu(self.first(images.view(batch * cameras, channels, height, width)))
            y = self.last(F.interpolate(x, size=(height, width)))
            return y.view(batch, cameras, 2, height, width)

    x = torch.randn(2, 3, 3, 6, 8)
    model = calibrated(Cameras(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile, dynamic_batch=True)
    assert file.inputs == {"images": ("batch", 3, 3, 6, 8)}
    assert file.outputs == {"output": ("batch", 3, 2, 6, 8)}
    for batch in (1, 2, 5):
        images = torch.randn(batch, 3, 3, 6, 8)
        (made,), _ = run(file, images, optimised=profile == "onnxruntime")
        want = simulate(model, images)(images)
        torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-4)
    fixed = export_qdq_onnx(model, x, tmp_path / "fixed.onnx", profile)
    assert fixed.inputs == {"images": (2, 3, 3, 6, 8)}


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(2).unsqueeze(-1),
    "permute": lambda x: x.permute(0, 1, 3, 2),
    "transpose": lambda x: x.transpose(-1, -2).contiguous(),
    "movedim": lambda x: x.movedim(3, 2),
    "reshape": lambda x: x.reshape(2, 8, 3, 8),
    "squeeze": lambda x: x.unsqueeze(2).squeeze(2),
    "slice": lambda x: x[:, :, 1:5:2, :-1],
    "ellipsis": lambda x: x[..., 2:],
    "index": lambda x: x[:, :, 1].unsqueeze(3),
    "narrow": lambda x: x.narrow(2, 1, 3),
    "select": lambda x: x.select(3, 2).unsqueeze(3),
    "chunk": lambda x: torch.cat([x.chunk(2, dim=3)[1], x], 3),
    "tuple": lambda x: torch.cat(x.chunk(2, dim=1), 1),
    "split": lambda x: torch.cat([x.split([1, 3], dim=2)[1], x.split(1, dim=2)[0]], 2),
    "unbind": lambda x: x.unbind(2)[1].unsqueeze(2),
    "stack": lambda x: torch.stack([x, x], 2).flatten(2, 3),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "expand": lambda x: x[:, :, :1].expand(-1, -1, 3, -1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(torch.cat([x, x, x, x], 1), 2),
}


class Moving(nn.Module):
    """Values are moved between two layers."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.move = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), move

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.move(F.relu(self.first(x))))


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
@pytest.mark.parametrize("name", MOVES)
def test_values_are_moved_as_torch_does(
    name: str, profile: str, calibrated: Fixture, once: Fixture, tmp_path: Path
) -> None:
    def make() -> tuple[nn.Module, IntegerModel, Tensor]:
        x = torch.randn(2, 3, 4, 6)
        model = calibrated(Moving(MOVES[name]), x)
        return model, simulate(model, x), x

    model, integer, x = once(name, make)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    differences = compare_qdq_onnx(file, model if profile == "onnxruntime" else integer, x)
    assert differences
    assert sum(d.different for d in differences) == 0
    assert file.outputs == {"output": tuple(integer(x).shape)}


def test_outputs_in_a_tuple_that_torch_made_inputs_handed_on_and_constants(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.anchors = nn.Conv2d(3, 4, 1), nn.Parameter(torch.rand(3, 2))

        def forward(self, x: Tensor) -> tuple[Any, ...]:
            y = self.conv(x)
            return y.chunk(2, 1), y, x, y, self.anchors.sigmoid()

    x = torch.randn(2, 3, 4, 6)
    model = calibrated(Net(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    assert list(file.outputs) == [
        "output_0_0", "output_0_1", "output_1", "output_2", "output_3", "output_4",
    ]  # fmt: skip
    made, _ = run(file, x)
    (a, b), *others = simulate(model, x)(x)
    for got, want in zip(made, (a, b, *others), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU(0.1), nn.SiLU(), nn.Softmax(1), nn.Softplus(),
        nn.AvgPool2d(2), nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(8, 8, 3, padding=1),
        nn.Dropout(), nn.BatchNorm2d(8),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_float_layers_on_the_list_stand_between_integer_ones(
    layer: nn.Module, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    if hasattr(layer, "reset_parameters"):
        layer.reset_parameters()  # made before the seed was set

    # A second reader keeps a batch norm from being folded.
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer, self.last = nn.Conv2d(3, 8, 1), layer, nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.first(x)
            return self.last(self.layer(y)), y

    x = torch.randn(2, 3, 4, 6)
    model = calibrated(Net(), x, exclude=("layer",))
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    made, _ = run(file, x)
    for y, want in zip(made, simulate(model, x)(x), strict=True):
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)


GRIDS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "dilated": (
        lambda: [nn.Conv2d(4, 8, 3, dilation=2, padding=(2, 1)), nn.MaxPool2d(2)],
        (2, 4, 9, 11),
    ),
    "depthwise": (lambda: [nn.Conv2d(4, 8, 3, groups=4, stride=(2, 1)), nn.ReLU()], (2, 4, 9, 11)),
    "same": (lambda: [nn.Conv2d(4, 8, (4, 3), padding="same"), nn.ReLU()], (2, 4, 9, 11)),
    "ceil": (lambda: [nn.Conv2d(4, 8, 1), nn.MaxPool2d(3, 2, 1, ceil_mode=True)], (2, 4, 8, 10)),
    "average": (
        lambda: [nn.Conv2d(4, 8, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False)],
        (2, 4, 9, 9),
    ),
    "counted": (lambda: [nn.Conv2d(4, 8, 1), nn.AvgPool2d(3, 1, 1)], (2, 4, 9, 9)),
    "counted over the edge": (
        lambda: [nn.Conv2d(4, 8, 1), nn.AvgPool2d(3, 2, 1, ceil_mode=True)],
        (2, 4, 8, 10),
    ),
    "over the edge": (
        lambda: [nn.Conv2d(4, 8, 1), nn.AvgPool2d((3, 2), 2, ceil_mode=True)],
        (2, 4, 8, 9),
    ),
    "adaptive": (lambda: [nn.Conv2d(4, 8, 1), nn.AdaptiveAvgPool2d((3, 1))], (2, 4, 9, 5)),
    "windows of several sizes": (
        lambda: [nn.Conv2d(4, 8, 1), nn.AdaptiveAvgPool2d((4, 2))],
        (2, 4, 9, 6),
    ),
    "finer than it was": (lambda: [nn.Conv2d(4, 8, 1), nn.AdaptiveAvgPool2d(6)], (2, 4, 4, 5)),
    "line": (lambda: [nn.Conv1d(4, 8, 3, padding=1), nn.Upsample(13), nn.ReLU()], (2, 4, 9)),
    "volume": (
        lambda: [nn.Conv3d(4, 8, 3, padding=1), nn.SiLU(), nn.Upsample(scale_factor=2)],
        (2, 4, 3, 4, 5),
    ),
    "corners": (
        lambda: [nn.Conv2d(4, 8, 1), nn.Upsample((9, 8), mode="bilinear", align_corners=True)],
        (2, 4, 5, 6),
    ),
    "grown": (lambda: [nn.Conv2d(4, 8, 1), nn.Upsample((7, 9), mode="bilinear")], (2, 4, 5, 6)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
@pytest.mark.parametrize("name", GRIDS)
def test_layers_over_grids_have_torchs_geometry(
    name: str, profile: str, calibrated: Fixture, once: Fixture, tmp_path: Path
) -> None:
    def make() -> tuple[nn.Module, IntegerModel, Tensor]:
        layers, shape = GRIDS[name]
        rank = len(shape) - 2
        last = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank](8, 4, 1)
        x = torch.randn(*shape)
        model = calibrated(nn.Sequential(*layers(), last), x)
        return model, simulate(model, x), x

    model, integer, x = once(name, make)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    differences = compare_qdq_onnx(file, model if profile == "onnxruntime" else integer, x)
    assert len(differences) >= 2
    for d in differences:
        mixes = d.op in ("avg_pool", "resize") or (d.op == "quantize" and d.path != "input")
        assert d.largest <= mixes, d
        # Weights of a half and a quarter put many averages on half a step.
        assert d.different <= (0.1 if mixes else 0) * d.elements, d


def test_a_window_that_would_begin_in_the_padding_is_refused(
    calibrated: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 4, 5, 5)
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.AvgPool2d(2, 2, 1, ceil_mode=True), nn.ReLU())
    with pytest.raises(ValueError, match=r"export_qdq_onnx: 1: .* less padding"):
        export_qdq_onnx(calibrated(net, x), x, tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x)
        made, weights = self.attend(y + x.mean(-1, keepdim=True), y, y)
        return y + made, weights


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
def test_projections_of_torchs_attention_are_integers(
    profile: str, calibrated: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 5, 6)
    model = calibrated(Attending(), x)
    integer = simulate(model, x)
    paths = {f"attend.{name}_proj" for name in ("q", "k", "v", "out")}
    assert {step.path for step in integer.steps if step.op == "linear"} == {"stem", *paths}
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    differences = compare_qdq_onnx(file, model, x)
    assert not any(d.unexplained for d in differences)


def test_a_projection_without_its_input_quantizer_is_a_float_layer(
    calibrated: Fixture, tmp_path: Path, run: Fixture
) -> None:
    x = torch.randn(2, 5, 6)
    model = calibrated(Attending(), x)
    model.attend.v_proj._input_quantizer.disable()
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    made, _ = run(file, x)
    for y, want in zip(made, simulate(model, x)(x), strict=True):
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)


class Uneven(nn.Conv2d):
    """Pads one side alone, then applies its weight; its activation is a member of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.after = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1, 0, 1))
        return self.after(F.conv2d(x, self.weight, self.bias, self.stride))


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
def test_a_layer_with_a_forward_of_its_own_runs_in_integers(
    profile: str, calibrated: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(1, 3, 8, 8)
    model = calibrated(nn.Sequential(Uneven(3, 8, 2, 2), Uneven(8, 4, 2)), x)
    computed = [
        s.op for s in simulate(model, x).steps if s.op not in ("number", "require", "layout")
    ]
    assert computed == ["quantize", "conv", "conv"]
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    assert not any(row.different for row in compare_qdq_onnx(file, model, x))
