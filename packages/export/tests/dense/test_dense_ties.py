"""Values that differ because float32 cannot tell between two steps, and values that are wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from bevquant_export import compare_qdq_onnx, export_qdq_onnx, find_target
from bevquant_export.dense._source import program_of
from bevquant_export.dense.verify import _compare
from bevquant_export.dense.verify._float_errors import FloatErrors
from bevquant_export.dense.verify._pieces import Pieces
from bevquant_export.dense.verify._rounding_boundary import RoundingBoundary, products_at
from bevquant_export.runtime._alike import StableChoices
from bevquant_int8sim import program, simulate
from bevquant_qnn import QuantAdd, QuantConfig, quantize_model
from bevquant_quantizers import calibrate

Fixture = Callable[..., Any]
Integers = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module", params=[1.0, 0.25], ids=["unit 1", "unit 1/4"])
def on_borders(request: Any) -> tuple[nn.Module, Tensor, Integers, Integers]:
    """A convolution that sums to all of −16256 … 16256, its image, and two roundings of the sums.

    A sum's unit is 1 or 1/4, the output's step is 30 of it, so that 15, 45, 75, … lie on borders,
    and the product with 1/30 falls to one side in float64, as in the integer model, and often to
    the other one in float32, as in onnxruntime.
    """
    unit: float = request.param
    net = nn.Sequential(nn.Conv2d(2, 1, 1, bias=False), nn.Conv2d(1, 1, 1)).eval()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([127.0, 1.0]).view(1, 2, 1, 1) * unit)
    steps = torch.arange(-127.0, 128.0)
    image = torch.stack(torch.meshgrid(steps, steps, indexing="ij"))[None]
    model: Any = quantize_model(net, example_inputs=image).model.eval()
    sums = (127 * image[0, 0] + image[0, 1]).numpy().astype(np.int64)
    doubles = np.rint(sums * (1 / 30)).clip(-128, 127)
    products = np.rint(sums.astype(np.float32) * (np.float32(1) / np.float32(30))).clip(-128, 127)
    for quantizer, largest in (
        (model[0]._input_quantizer, 127.0),
        (model[0]._weight_quantizer, torch.full((1, 1, 1, 1), 127.0 * unit)),
        (model[1]._input_quantizer, 30 * 127.0 * unit),
        (model[1]._weight_quantizer, torch.ones(1, 1, 1, 1)),
    ):
        quantizer.amax = largest
    return model, image, doubles, products


def test_onnxruntimes_float32_products_are_ties(tmp_path: Path, on_borders: Any) -> None:
    model, image, doubles, products = on_borders
    file = export_qdq_onnx(model, image, tmp_path / "net.onnx", "onnxruntime")
    row = compare_qdq_onnx(file, model, image)[1]
    assert row.op == "conv"
    assert row.different == np.count_nonzero(doubles != products) > 100
    assert (row.ties, row.unexplained, row.largest) == (row.different, 0, 1)


@pytest.mark.parametrize(("apart", "openvino"), [(1e-5, 1), (1e-3, 0)])
def test_openvino_counts_levels_from_the_lowest_value(
    on_borders: Any, apart: float, openvino: int
) -> None:
    """A sum of 1 lies `apart` from the border of 0 and 1: float32 tells them apart, but not 127.5
    from 127.5 and a little, which OpenVINO rounds."""
    model, image, *_ = copy.deepcopy(on_borders)
    model[1]._input_quantizer.amax = model[0]._weight_quantizer.amax.item() / (0.5 - apart)
    integers = simulate(model, image)
    (layer, *_) = (step for step in integers.steps if step.op == "conv")
    values = {layer.args[0].name: np.array([0.0, 1.0]).reshape(1, 2, 1, 1)}
    first, border = np.zeros((1, 4), int), np.array([0.5])
    for name, ties in ("onnxruntime", 0), ("openvino", openvino):
        found = RoundingBoundary(integers.program, values, {}, find_target(name).form)
        assert found.count(layer.outputs[0], first, border, (1, 1, 1, 1)) == ties


@pytest.mark.parametrize(("apart", "ties"), [(500, 1), (600, 0)])
def test_openvino_rounds_a_product_before_its_bias(
    on_borders: Any, apart: float, ties: int
) -> None:
    """8·2⁻²⁴ of the product, of the sum with the bias, and of the sum's level, 100.5 + 256."""
    model, image, *_ = copy.deepcopy(on_borders)
    total = 127 * 100 * model[0]._weight_quantizer.amax.item() / 127
    border = 100.5 + 8 * 2.0**-24 * apart
    model[1]._input_quantizer.amax = 127 * total / border
    integers = simulate(model, image)
    (layer, *_) = (step for step in integers.steps if step.op == "conv")
    values = {layer.args[0].name: np.array([100.0, 0.0]).reshape(1, 2, 1, 1)}
    found = RoundingBoundary(integers.program, values, {}, find_target("openvino").form)
    at = np.zeros((1, 4), int), np.array([100.5]), (1, 1, 1, 1)
    assert found.count(layer.outputs[0], *at) == ties
    unknown = RoundingBoundary(integers.program, {}, {}, find_target("openvino").form)
    assert unknown.count(layer.outputs[0], *at) == 0


def test_a_sum_on_a_border_is_a_tie() -> None:
    """(1 + 2)/4 lies between one and two steps of a half; (1 + 1)/4 and (1 + 3)/4 are steps."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.join, self.last = QuantAdd(), nn.Linear(3, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.last(self.join(x, y))

    given = torch.ones(1, 3), torch.ones(1, 3)
    model: Any = quantize_model(Sum().eval(), example_inputs=given).model
    calibrate(model, [given], forward=lambda net, pair: net(*pair))
    model.join._input_quantizer.amax = torch.tensor(127 / 4)
    model.last._input_quantizer.amax = torch.tensor(127 / 2)
    integers = simulate(model, given)
    (step,) = (step for step in integers.steps if step.op == "add")
    a, b = np.array([[1.0, 1.0, 1.0]]), np.array([[1.0, 2.0, 3.0]])
    values = dict(zip((ref.name for ref in step.args), (a, b), strict=True))
    found = RoundingBoundary(integers.program, values, {}, find_target("onnxruntime").form)
    places, borders = np.array([[0, 0], [0, 1], [0, 2]]), np.full(3, 1.5)
    assert found.count(step.outputs[0], places, borders, (1, 3)) == 1


def test_a_choice_is_a_tie_if_the_chosen_value_is() -> None:
    """Models of bevquant_hybrid round the result of `torch.where` themselves."""
    tenths = program.Integers(0.1, 8, -128, 127)
    forms = {"mask": "float", "one": tenths, "two": tenths, "y": program.Integers(1, 8, -128, 127)}
    refs = tuple(program.Ref(name) for name in ("mask", "one", "two"))
    step = program.FloatCall("where", refs, ("y",), name="Where")
    held: Any = SimpleNamespace(
        values={name: SimpleNamespace(form=form) for name, form in forms.items()}, steps=[step]
    )
    values = {
        "mask": np.array([True, False, True]), "one": np.array([5, 5, 7], np.int8),
        "two": np.array([7, 7, 5], np.int8),
    }  # fmt: skip
    boundary = RoundingBoundary(held, values, {}, find_target("horizon").form)
    assert boundary.reads("y") == {"mask", "one", "two"}
    assert boundary.count("y", np.arange(3)[:, None], np.full(3, 0.5), (3,)) == 1
    # All of many are counted, unless some is no tie and the verdict is clear.
    many = np.zeros((200_001, 1), int)
    assert boundary.count("y", many, np.full(len(many), 0.5), (3,)) == len(many)
    many[::2] = 1
    assert 40_000 < boundary.count("y", many, np.full(len(many), 0.5), (3,)) < 60_000


def test_a_weight_that_is_a_step_off_is_no_tie(tmp_path: Path, on_borders: Any) -> None:
    model, image, _, _ = on_borders
    file = export_qdq_onnx(model, image, tmp_path / "net.onnx", "onnxruntime")
    proto = onnx.load(file.path)
    (weight,) = (c for c in proto.graph.initializer if c.name == "0.weight")
    changed = numpy_helper.to_array(weight).copy()
    changed[0, 1] += 1
    weight.CopyFrom(numpy_helper.from_array(changed, weight.name))
    onnx.save(proto, file.path)
    row = compare_qdq_onnx(file, model, image)[1]
    assert row.largest == 5  # 127 / 30, rounded up
    assert row.unexplained > 0.99 * row.different > 1000


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
@pytest.mark.parametrize("corners", [False, True])
def test_bilinear_resizing_differs_in_ties_alone(
    calibrated: Fixture, tmp_path: Path, profile: str, corners: bool
) -> None:
    class Resized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.first(x))
            return self.last(F.interpolate(y, (28, 20), mode="bilinear", align_corners=corners))

    x = torch.randn(4, 4, 14, 10)
    model = calibrated(Resized(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    (row,) = (row for row in compare_qdq_onnx(file, model, x) if row.op == "resize")
    # With weights of a quarter and three, every sixteenth value lies on a border.
    assert row.unexplained == 0
    assert (row.different > 0) is not corners


class Every(nn.Module):
    """Each kind of layer, grouped and strided, and a sum of two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.join = QuantAdd()
        self.last = nn.Linear(4, 3)
        self.end = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        y = self.join(F.relu(self.up(y + self.second(y))), x)
        return self.end(self.last(y.permute(0, 2, 3, 1)))


class Shifted:
    """onnxruntime, and in every integer one bit flipped."""

    def __init__(self, inner: Any, bit: int) -> None:
        self.inner = inner
        self.bit = bit

    def get_inputs(self) -> Any:
        return self.inner.get_inputs()

    def run(self, names: list[str], given: Any) -> list[Any]:
        return [value ^ self.bit for value in self.inner.run(names, given)]


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
def test_what_is_off_elsewhere_is_no_tie(
    calibrated: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    x = torch.randn(2, 4, 16, 16)
    model = calibrated(Every(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    assert [(r.path, r.op) for r in compare_qdq_onnx(file, model, x) if r.unexplained] == []
    session = onnxruntime.InferenceSession
    for bit, share in ((1, 0.02), (2, 0.0)):
        made = partial(_shifted, session, bit)
        monkeypatch.setattr(onnxruntime, "InferenceSession", made)
        rows = compare_qdq_onnx(file, model, x)
        assert all(row.different == row.elements for row in rows)
        assert [row for row in rows if row.ties > share * row.elements] == []
    kinds = {"conv", "conv_transpose", "add", "quantize"}
    # hb_mapper's files have no pair behind the Reshape that a linear layer needs here.
    assert kinds | ({"linear"} if profile != "horizon" else set()) <= {row.op for row in rows}


def _shifted(session: Any, bit: int, *args: Any, **kwargs: Any) -> Shifted:
    return Shifted(session(*args, **kwargs), bit)


LAYERS = {
    "conv": nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
    "dilated": nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
    "one axis": nn.Conv1d(4, 6, 3, padding=1),
    "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
    "transposed, uneven": nn.ConvTranspose2d(4, 6, (2, 3), stride=(2, 1), padding=(0, 1)),
    "linear": nn.Linear(4, 6),
}


@pytest.mark.parametrize("name", LAYERS)
def test_sums_at_places_are_those_of_torch(name: str) -> None:
    layer: Any = LAYERS[name]
    rank = layer.weight.dim() - 2
    shape = (2, 5, 4) if name == "linear" else (2, 4, *(7, 9)[:rank])
    x, weight = torch.randint(-128, 128, shape), torch.randint(-127, 128, layer.weight.shape)
    settings: dict[str, Any] = {}
    kind: Any
    if name == "linear":
        kind, want = program.Linear, F.linear(x.double(), weight.double())
        size = F.linear(x.double().abs(), weight.double().abs())
        square = F.linear(x.double() ** 2, weight.double() ** 2)
    else:
        kind = program.ConvTranspose if layer.transposed else program.Conv
        settings = {n: getattr(layer, n) for n in ("stride", "padding", "dilation", "groups")}
        added = {"output_padding": layer.output_padding} if layer.transposed else {}
        run: Any = getattr(F, f"{kind.op}{rank}d")
        want = run(x.double(), weight.double(), **settings, **added)
        size = run(x.double().abs(), weight.double().abs(), **settings, **added)
        square = run(x.double() ** 2, weight.double() ** 2, **settings, **added)
        settings |= added
        if kind is program.Conv:
            settings["padding"] = tuple((p, p) for p in layer.padding)
    step = kind("", (), ("y",), form="int32", weight=weight.to(torch.int8), **settings)
    places = np.argwhere(np.ones(want.shape, bool))
    total, magnitude, squares, terms = products_at(step, x.to(torch.int8).numpy(), places)
    assert (total == want.reshape(-1).numpy()).all()
    assert (magnitude == size.reshape(-1).numpy()).all()
    assert (squares == square.reshape(-1).numpy()).all()
    read = 4 // getattr(layer, "groups", 1)
    assert terms == read * (weight[0, 0].numel() if rank > 0 else 1)


@pytest.mark.parametrize("function", [nn.GELU, nn.SiLU])
def test_floats_next_to_zero_are_off_by_what_their_operands_are(tmp_path: Path, function) -> None:
    """x·(1 + erf(x/√2))/2 loses what is left of 1 − 1; and a value that is no tie is none."""
    x = torch.linspace(-6, -1, 60_000).view(1, 3, 200, 100)
    net = nn.Sequential(function(), nn.Conv2d(3, 4, 1)).eval()
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x])
    file = export_qdq_onnx(quantized, x, tmp_path / "net.onnx", "horizon", verify=False)
    assert compare_qdq_onnx(file, quantized, x)[0].unexplained == 0
    other = copy.deepcopy(quantized)
    quantizer = other[1]._input_quantizer
    quantizer.amax = quantizer.amax * 1.0001
    assert compare_qdq_onnx(file, other, x)[0].unexplained > 0


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
def test_linear_layers_on_three_axes_are_compared(tmp_path: Path, profile: str) -> None:
    """Gemm has two axes; what it makes is held against the integers of the layer all the same."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 4)).eval()
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x])
    file = export_qdq_onnx(quantized, x, tmp_path / "net.onnx", profile)
    other = copy.deepcopy(quantized)
    with torch.no_grad():
        other[2].weight *= -1
    rows = {row.path: row.unexplained for row in compare_qdq_onnx(file, other, x)}
    assert rows["2"] > 0
    assert sum(rows.values()) == rows["2"]


class NormOfTwo(nn.Module):
    """A norm of what two layers make, and a layer behind it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
        self.norm = nn.BatchNorm2d(16) if kind == "batch" else nn.LayerNorm(16)
        self.out = nn.Conv2d(16, 4, 1) if kind == "batch" else nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x), self.right(x)], 1)
        if isinstance(self.norm, nn.BatchNorm2d):
            return self.out(F.relu(self.norm(both)))
        return self.out(self.norm(both.permute(0, 2, 3, 1) + 0.3))


@pytest.mark.parametrize("wrong", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["batch", "layer"])
def test_a_norm_in_half_precision_is_off_by_its_terms(
    tmp_path: Path, kind: str, wrong: float
) -> None:
    """x − µ cancels: what halves lose is small against x, not against the difference."""
    torch.manual_seed(0)
    net, x = NormOfTwo(kind), torch.randn(2, 3, 32, 32) * 0.1
    if kind == "batch":
        net.norm.momentum = None
        net(x)
    net.eval()
    model = quantize_model(net, QuantConfig(exclude=("norm",)), example_inputs=x).model.eval()
    calibrate(model, [x], method="mse")
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11", verify=False)
    proto = onnx.load(file.path)
    for tensor in proto.graph.initializer:
        if wrong and tensor.name == "norm.bias.half":
            step = float(model.out._input_quantizer.amax) / 127
            shifted = numpy_helper.to_array(tensor) + wrong * step
            tensor.CopyFrom(numpy_helper.from_array(shifted.astype(np.float16), tensor.name))
    onnx.save(proto, file.path)
    (row,) = (r for r in compare_qdq_onnx(file, model, x) if r.path == "norm")
    assert row.different > 100
    assert (row.unexplained == 0) == (not wrong)


def test_errors_of_floats_are_found_where_a_verdict_depends_on_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16) * 0.1
    model = quantize_model(
        NormOfTwo("layer").eval(), QuantConfig(exclude=("norm",)), example_inputs=x
    ).model.eval()
    calibrate(model, [x])
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11", verify=False)
    choices = StableChoices()
    integer = program_of(model, x, verify=False)
    apart = partial(
        _compare.departing, Pieces(file, file.path.read_bytes(), integer.program), integer, (x,),
        integer_sums=False, inputs="the example", choices=choices,
    )  # fmt: skip
    run, passed = FloatErrors.run, set[bytes]()
    with mock.patch.object(FloatErrors, "run", autospec=True, side_effect=run) as runs:
        assert choices.called is None  # a model that chooses nothing is watched in one run
        assert not apart(passed=passed)
        assert runs.called
        assert choices.called is False
        runs.reset_mock()
        apart(passed=set(), found=set(file.integers.values()))
        assert not apart(passed=set(), least=2.0**-6)  # a step of 127
        with mock.patch.object(_compare, "_HALVES", 1.0):  # a step off is allowed anywhere
            assert not apart(passed=set())
        assert not runs.called
        apart(passed=set(), least=2.0**-8, known=(known := {}))
        assert runs.called
        runs.reset_mock()
        apart(passed=set(), known=known)
        assert not runs.called  # the errors are known
    with mock.patch.object(_compare, "rounded_session") as sessions:
        assert not apart(passed=passed)
    assert not sessions.called


class Neighbours(nn.Module):
    """Differences to the four nearest rows, by distances whose terms cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(x)) + 20
        sizes = y.square().sum(-1)
        far = sizes[:, None] - 2 * y @ y.T + sizes
        return self.last(y[far.topk(4, largest=False).indices] - y[:, None])


@pytest.mark.parametrize("wrong", [False, True])
def test_rows_are_others_where_rounding_swaps_their_scores(tmp_path: Path, wrong: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 3)
    model = quantize_model(Neighbours().eval(), example_inputs=x).model.eval()
    calibrate(model, [x])
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime", verify=False)
    proto = onnx.load(file.path)
    (choice,) = (node for node in proto.graph.node if node.op_type == "TopK")
    tensors = [n.attribute[0].t for n in proto.graph.node if n.op_type == "Constant"]
    for held in (*tensors, *proto.graph.initializer):
        values = numpy_helper.to_array(held)
        if values.dtype == np.float32 and (values == 20).all():  # to its neighbour in float32
            held.CopyFrom(numpy_helper.from_array(np.nextafter(values, 21), held.name))
    for attribute in choice.attribute:
        if attribute.name == "largest":
            attribute.i = int(wrong)
    onnx.save(proto, file.path)
    (row,) = (r for r in compare_qdq_onnx(file, model, x) if r.different)
    assert row.largest > 1
    assert (row.unexplained > 0.5 * row.different) if wrong else (row.unexplained == 0)
