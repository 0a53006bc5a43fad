"""Numbers that a forward takes out of its inputs: a file computes them, or it is not written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_export import compare_qdq_onnx, export_qdq_onnx, open_onnx
from bevquant_export._taken_numbers import _items
from bevquant_graph import capture
from bevquant_int8sim import simulate
from bevquant_int8sim.program import NumberCall, Ref
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

pytest.importorskip("onnxruntime")

Between = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Two layers, and something between them that reads numbers."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 4, 1)
        self.between = between

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        made: Tensor = self.b(self.between(self.a(x), n))
        return made


def quantized(between: Between, *frames: Any) -> nn.Module:
    torch.manual_seed(0)
    model = quantize_model(Net(between).eval(), example_inputs=frames[0]).model
    calibrate(model, list(frames))
    return model


def frames() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 12)
    return (x, torch.tensor([5, 3])), (x, torch.tensor([9, 2]))


def _bounded(y: Tensor, n: Tensor) -> Tensor:
    if (n > 6).any():
        return y
    assert n.max().item() < len(n.unique()) * 30  # with a bound beyond int64
    return y.relu()


def _looped(y: Tensor, n: Tensor) -> Tensor:
    for _ in range(int(n[1])):
        y = y + 1
    return y


COMPUTED: dict[str, Between] = {
    "largest": lambda y, n: y * (n.max().item() * 0.2),
    "int": lambda y, n: y + int(n.max()),
    "list": lambda y, n: y + n.tolist()[0] * 0.2,
    "power": lambda y, n: y * (1 + n.tolist()[1] ** 2) / n[0].item(),
    "count": lambda y, n: y + int((n > 3).sum()),
    "of two": lambda y, n: y + max(int(n[0]), int(n[1])),
    "slice": lambda y, n: y[..., : int(n.max())],
    "start": lambda y, n: y[..., int(n.argmax()) :],
    "range": lambda y, n: y[..., torch.arange(int(n.max()))],
    "remainder": lambda y, n: y + (n % n.min().item()).float().sum(),
    "flags": lambda y, n: y + (y > y.mean()).max(dim=0, keepdim=True)[0].float() + n[0],
    "quotient": lambda y, n: y + (torch.div(n << 40, 3, rounding_mode="trunc") % 8).float().sum(),
    "bytes": lambda y, n: y + (n * -300).view(torch.uint8).float().sum() * 0.01,
    "of bytes": lambda y, n: y + (n - 7).view(torch.uint8).view(torch.int64).float().sum(),
    "bits": lambda y, n: y + ((-n & 6) - (n | 5) + (n ^ -3) + ~n - (n & 0)).float().sum() * 0.1,
    "literal": lambda y, n: y + torch.tensor([n.max().item(), 2]).float().sum(),
    "parts": lambda y, n: torch.cat(y.split([int(n[0]), 12 - int(n[0])], -1)[::-1], -1),
    "padding": lambda y, n: nn.functional.pad(y, (0, int(n.max()))),
    "average": lambda y, n: F.adaptive_avg_pool1d(y[..., : int(n.max())], 1),
    "instance norm": lambda y, n: F.instance_norm(y[..., : int(n.max())]),
    "group norm": lambda y, n: F.group_norm(y[..., : int(n.max())], 2),
    "roll": lambda y, n: y[..., : int(n.max())].roll(2, -1),
    "roll all": lambda y, n: y[..., : int(n.max())].roll(3),
    "windows": lambda y, n: F.avg_pool1d(y[..., : int(n.max())], 2, 2, ceil_mode=True),
    "long windows": lambda y, n: F.avg_pool1d(y[..., : int(n.max())], 3, 2, ceil_mode=True),
    "largest of windows": lambda y, n: F.max_pool2d(y[..., : int(n.max())], (1, 2), ceil_mode=True),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_number_of_an_input_is_computed_in_the_file(name: str, tmp_path: Path) -> None:
    example, other = frames()
    model = quantized(COMPUTED[name], example, other)
    made = export_qdq_onnx(model, example, tmp_path / "net.onnx", "onnxruntime")
    inputs = dict(zip(made.inputs, other, strict=True))
    (got,) = open_onnx(made.path, "onnxruntime")(inputs).values()
    want = model(*other).detach()
    assert got.shape == want.shape
    assert (got - want).norm() < 0.02 * want.norm()
    assert not any(row.unexplained for row in compare_qdq_onnx(made, model, other))


@pytest.mark.parametrize("profile", ["tensorrt10", "tensorrt11", "openvino"])
@pytest.mark.parametrize("name", ["list", "slice"])
def test_so_it_is_for_other_engines(
    name: str, profile: str, once: Callable[..., Any], tmp_path: Path
) -> None:
    if profile == "openvino":
        pytest.importorskip("openvino")
    example, other = frames()
    model = once(f"{name} computed", lambda: quantized(COMPUTED[name], example, other))
    made = export_qdq_onnx(model, example, tmp_path / "net.onnx", profile)
    (got,) = open_onnx(made.path)(dict(zip(made.inputs, other, strict=True))).values()
    want = model(*other).detach()
    assert (got - want).norm() < 0.02 * want.norm()


def test_a_number_is_computed_where_the_batch_is_free(tmp_path: Path) -> None:
    example, other = frames()
    model = quantized(COMPUTED["slice"], example, other)
    path = tmp_path / "net.onnx"
    made = export_qdq_onnx(model, example, path, "onnxruntime", dynamic_batch=True)
    frame = torch.randn(5, 3, 12), torch.tensor([4, 8, 1, 2, 3])
    (got,) = open_onnx(path, "onnxruntime")(dict(zip(made.inputs, frame, strict=True))).values()
    assert got.shape == (5, 4, 8)


DECIDED: dict[str, Between] = {
    "branch": lambda y, n: y.relu() if int(n.max()) > 6 else y,
    "truth": lambda y, n: y.relu() if (n > 6).any() else y,
    "loop": _looped,
    "bounded": _bounded,
    "size": lambda y, n: y.relu() if y[..., : int(n.max())].shape[-1] > 6 else y,
    "odd size": lambda y, n: y.relu() if y[..., : int(n.max())].shape[-1] % 2 else y,
    "size of windows": lambda y, n: y.relu() if (int(n.max()) - 1) // 2 * 2 < 5 else y,
}


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("name", DECIDED)
def test_a_decision_on_a_number_is_refused(
    name: str, profile: str, once: Callable[..., Any], tmp_path: Path
) -> None:
    example, _ = frames()
    model = once(name, lambda: quantized(DECIDED[name], example))
    line = rf"{Path(__file__).name}:\d+\).*decides by a number out of this tensor.*torch\.where"
    with pytest.raises(ValueError, match=line):
        export_qdq_onnx(model, example, tmp_path / "net.onnx", profile)
    assert not list(tmp_path.iterdir())


class Points(nn.Module):
    """Layers of points, with a decision on their places between."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 4)
        self.between = between

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        made: Tensor = self.b(self.between(self.a(x), n))
        return made


@pytest.mark.parametrize("name", ["branch", "truth", "loop", "bounded"])
def test_files_of_points_for_onnxruntime_check_decisions(name: str, tmp_path: Path) -> None:
    x, n = torch.randn(40, 3), torch.tensor([[5], [3]])
    model = quantize_model(Points(DECIDED[name]).eval(), example_inputs=(x, n)).model
    calibrate(model, [(x, n)])
    made = export_qdq_onnx(model, (x, n), tmp_path / "net.onnx", "onnxruntime")
    run = open_onnx(made.path, "onnxruntime")
    like = torch.randn(30, 3), torch.tensor([[1], [3]])
    (got,) = run(dict(zip(made.inputs, like, strict=True))).values()
    assert (got - model(*like)).abs().max() < 0.05
    with pytest.raises(Exception, match=rf"{Path(__file__).name}:\d+.* is the example's"):
        run(dict(zip(made.inputs, (x, torch.tensor([[9], [2]])), strict=True)))


def _columns(y: Tensor, n: Tensor) -> Tensor:
    columns = (n > 2).nonzero()
    if len(columns) != 8:  # a check, as an assert, which pytest would rewrite
        raise ValueError
    return y[:, columns[:, 0]]


def _with_unlike(y: Tensor, n: Tensor) -> Tensor:
    if n.unique().numel() != 7:  # TensorRT does not import Unique
        raise ValueError
    return y.relu()


@pytest.mark.parametrize("between", [_columns, _with_unlike])
@pytest.mark.parametrize("profile", ["tensorrt11", "onnxruntime"])
def test_a_check_of_a_number_of_rows_is_no_decision(
    between: Between, profile: str, tmp_path: Path
) -> None:
    x, n = torch.randn(4, 3), torch.tensor([5, 7, 3, 9, 6, 8, 4, 9])
    model = quantize_model(Points(between).eval(), example_inputs=(x, n)).model
    calibrate(model, [(x, n)])
    made = export_qdq_onnx(model, (x, n), tmp_path / "net.onnx", profile)
    other = x, n.flip(0)
    (got,) = open_onnx(made.path, profile)(dict(zip(made.inputs, other, strict=True))).values()
    assert (got - model(*other)).abs().max() < 0.05


def test_sizes_that_a_literal_gives_do_not_follow_the_batch(tmp_path: Path) -> None:
    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.o = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, q: Tensor, v: Tensor) -> Tensor:
            h, w = torch.tensor([[4, 6]])[0]
            v = self.v(v)
            maps = v.transpose(1, 2).reshape(v.shape[0], 8, h, w)
            grid = self.o(q).tanh()[:, :, None]
            return nn.functional.grid_sample(maps, grid, align_corners=False)[..., 0]

    inputs = torch.randn(1, 6, 8), torch.randn(1, 24, 8)
    model = quantize_model(Sampled().eval(), example_inputs=inputs).model
    calibrate(model, [inputs])
    made = export_qdq_onnx(model, inputs, tmp_path / "net.onnx", "onnxruntime")
    assert made.outputs == {"output": (1, 8, 6)}


COUNTS: dict[str, Callable[[Tensor], Any]] = {
    "number + 1": lambda coords: coords[:, 0].max().int().item() + 1,
    "tensor + 1": lambda coords: coords[:, 0].max() + 1,
    "of the last row": lambda coords: (coords[:, [0, 1]].clone()[:, 0][-1] + 1).int(),
}


class Frames(nn.Module):
    """As many sums as there are frames, as a scatter of pillars makes maps."""

    def __init__(self, count: Callable[[Tensor], Any] = COUNTS["number + 1"]) -> None:
        super().__init__()
        self.fc, self.count = nn.Linear(3, 4), count

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        rows = self.fc(x)
        count = self.count(coords)
        return torch.stack([rows[coords[:, 0] == i].sum(0) for i in range(count)])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("profile", ["onnxruntime", "tensorrt"])
def test_the_number_of_frames_is_a_constant_that_is_checked(
    profile: str, count: str, once: Callable[..., Any], tmp_path: Path
) -> None:
    x, column = torch.randn(6, 3), torch.arange(6)

    def frame(*batch: int) -> tuple[Tensor, Tensor]:
        return x, torch.stack([torch.tensor(batch), column], 1)

    def calibrated() -> nn.Module:
        made = quantize_model(Frames(COUNTS[count]).eval(), example_inputs=example).model
        calibrate(made, [example])
        return made

    example = frame(0, 0, 0, 1, 1, 1)
    model = once(count, calibrated)
    made = export_qdq_onnx(model, example, tmp_path / "net.onnx", profile)
    assert "the number of frames is the example's" in made.notes[0]
    run = open_onnx(made.path, profile)
    given = dict(zip(made.inputs, frame(1, 0, 1, 0, 0, 1), strict=True))
    assert (run(given)["output"] - model(*given.values())).abs().max() < 1e-2
    for batch in ((0, 0, 0, 0, 0, 0), (0, 1, 2, 0, 1, 2)):
        with pytest.raises(ValueError, match=r"input coords: .* 2 frames"):
            run(dict(zip(made.inputs, frame(*batch), strict=True)))


@pytest.mark.parametrize("numbers", [(0.5, 0.9), (2, 3), (np.ones(2), np.zeros(2))])
def test_a_frame_with_another_number_than_the_file_is_refused(
    numbers: tuple[Any, Any], tmp_path: Path
) -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, metas: Any) -> Tensor:
            value = metas[0]["t"]
            return self.fc(x * float(value.sum() if isinstance(value, np.ndarray) else value))

    one, other = ((torch.ones(2, 4), [{"t": number, "name": number}]) for number in numbers)
    model = quantize_model(Given().eval(), example_inputs=one).model
    calibrate(model, [one])
    made = export_qdq_onnx(model, one, tmp_path / "net.onnx", "onnxruntime")
    assert not any(row.unexplained for row in compare_qdq_onnx(made, model, one))
    for given in (model, made.integer_model):
        with pytest.raises(ValueError, match=r"inputs\[1\]\[0\]\['t'\] is .* in net.onnx, got "):
            compare_qdq_onnx(made, given, other)


def test_onnxruntime_itself_ends_a_run_of_other_frames(tmp_path: Path) -> None:
    import onnxruntime

    x = torch.randn(4, 3)
    coords = torch.tensor([[0, 1], [1, 2], [0, 3], [1, 4]])
    model = quantize_model(Frames().eval(), example_inputs=(x, coords)).model
    calibrate(model, [(x, coords)])
    made = export_qdq_onnx(model, (x, coords), tmp_path / "net.onnx", "onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(made.path), options)
    coords[0, 0] = 2
    with pytest.raises(Exception, match="the_number_of_frames"):
        session.run(None, {"x": x.numpy(), "coords": coords.numpy()})


ROWS: dict[str, Between] = {
    "mask": lambda y, n: y * 2 if y[0, 0][n[0] > 0].shape[0] > 4 else y,
    "nonzero": lambda y, n: y * 2 if n[0].nonzero().shape[0] == 0 else y,
}


@pytest.mark.parametrize("name", ROWS)
def test_a_branch_on_rows_of_a_mask(name: str, tmp_path: Path) -> None:
    x, n = torch.randn(1, 3, 12), (torch.arange(12) < 7).long()[None]
    line = rf"{Path(__file__).name}:\d+\), asked about in .*{Path(__file__).name}:\d+"
    model = quantized(ROWS[name], (x, n))
    with pytest.raises(ValueError, match=rf"{line}.*of rows"):
        export_qdq_onnx(model, (x, n), tmp_path / "net.onnx", "tensorrt11")
    assert not list(tmp_path.iterdir())
    made = export_qdq_onnx(model, (x, n), tmp_path / "net.onnx", "onnxruntime")
    run = open_onnx(made.path, "onnxruntime")
    (got,) = run({"x": x, "n": n.flip(1)}).values()
    assert (got - model(x, n.flip(1))).abs().max() < 0.05
    with pytest.raises(Exception, match=rf"{line}.* is the example's"):
        run({"x": x, "n": n * 0})


@pytest.mark.parametrize("profile", ["onnxruntime", "tensorrt11"])
def test_the_best_of_any_number_of_rows(profile: str, tmp_path: Path) -> None:
    """The remedy for a branch on the number: at most that many are taken."""

    def best(y: Tensor, n: Tensor) -> Tensor:
        rows = y[0].t()[n[0] > 0]
        return rows[rows[:, 0].topk(min(5, len(rows)))[1]].t()[None]

    x, places = torch.randn(1, 3, 12), torch.arange(12)[None]
    model = quantized(best, (x, (places < 7).long()))
    made = export_qdq_onnx(model, (x, (places < 7).long()), tmp_path / "net.onnx", profile)
    for rows in (9, 5, 2):
        frame = (x.roll(rows, -1), (places < rows).long())
        assert model(*frame).shape[-1] == min(rows, 5)
        assert sum(row.unexplained for row in compare_qdq_onnx(made, model, frame)) == 0


def test_rows_of_a_mask_in_place_of_as_many_others(tmp_path: Path) -> None:
    """As the pixels of Far3D's boxes: only the forward knows that the numbers agree."""

    def placed(y: Tensor, n: Tensor) -> Tensor:
        rows = y.transpose(1, 2)[(n > 0)[..., None].repeat(1, 1, 8)].reshape(-1, 8)
        mixed = y.transpose(1, 2) * 2
        mixed[:, -5:] = torch.cat([rows[:, :4], y[0, :4, :5].t()], 1)[None].relu()
        return mixed.transpose(1, 2)

    x, n = torch.randn(1, 3, 12), (torch.arange(12) < 5).long()[None]
    model = quantized(placed, (x, n))
    integers = simulate(model, (x, n), graph=capture(model, (x, n), open_sizes=False))
    made = export_qdq_onnx(integers, (x, n), tmp_path / "net.onnx", "onnxruntime")
    frame = x.flip(2), n.flip(1)
    assert sum(row.unexplained for row in compare_qdq_onnx(made, integers, frame)) == 0


@pytest.mark.parametrize("parts", [2, 3])
def test_equal_parts_of_any_number_of_rows(parts: int, tmp_path: Path) -> None:
    """As of the rows of two images, which are joined for a layer."""

    def joined(y: Tensor, n: Tensor) -> Tensor:
        rows = y[0].t()[n[0] > 0]
        first, *_, last = torch.cat([rows, *[rows.flip(1)] * (parts - 1)]).relu().chunk(parts)
        return (first - last).t()[None]

    x, places = torch.randn(1, 3, 12), torch.arange(12)[None]
    model = quantized(joined, (x, (places < 7).long()))
    made = export_qdq_onnx(model, (x, (places < 7).long()), tmp_path / "net.onnx", "onnxruntime")
    for rows in (9, 4, 1):
        frame = (x.roll(rows, -1), (places < rows).long())
        assert sum(row.unexplained for row in compare_qdq_onnx(made, model, frame)) == 0


POOLED: dict[str, Between] = {
    "of a slice": lambda y, n: F.adaptive_avg_pool2d(y[..., : int(n.max())][:, :, None], (1, 2)),
    "of rows": lambda y, n: F.adaptive_avg_pool1d(y[0].t()[n[0] > 0].t()[None], 2)[:, :, None],
}


@pytest.mark.parametrize("name", POOLED)
def test_windows_that_follow_values_are_refused(name: str, tmp_path: Path) -> None:
    def between(y: Tensor, n: Tensor) -> Tensor:
        return POOLED[name](y, n)[:, :, 0]

    frame = torch.randn(1, 3, 12), (torch.arange(12) * (torch.arange(12) < 9)).long()[None]
    with pytest.raises(ValueError, match=r"follow a free size \(axis \d\).*\.py:\d+"):
        export_qdq_onnx(quantized(between, frame), frame, tmp_path / "net.onnx", "onnxruntime")


def test_a_table_of_sizes_leaves_the_sizes_of_a_file_fixed(tmp_path: Path) -> None:
    def between(y: Tensor, n: Tensor) -> Tensor:
        levels = [y, y[..., ::2]]
        sizes = torch.as_tensor([(1, level.shape[-1]) for level in levels])
        part = torch.cat(levels, 2).split([h * w for h, w in sizes], 2)[1]
        high, wide = sizes[1]
        return part.reshape(y.shape[0], 8, high, wide).squeeze(2) + n.max()

    example, other = frames()
    model = quantized(between, example, other)
    made = export_qdq_onnx(model, example, tmp_path / "net.onnx", "onnxruntime")
    (got,) = open_onnx(made.path, "onnxruntime")(
        dict(zip(made.inputs, other, strict=True))
    ).values()
    want = model(*other).detach()
    assert (got - want).norm() < 0.02 * want.norm()


def test_each_producer_of_a_requirement_is_searched_once() -> None:
    item = NumberCall("", (Ref("x"),), ("n0",), name="item")
    sums = [NumberCall("", (Ref(f"n{i}"),) * 2, (f"n{i + 1}",), name="add") for i in range(60)]
    found = list(_items(sums[-1], {step.outputs[0]: step for step in (item, *sums)}))
    assert found == [item]
