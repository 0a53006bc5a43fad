"""Sensitivity: what a plain loop of full runs gives, bit for bit, with fewer multiplications."""

from __future__ import annotations

import copy
import gc
import json
import math
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bevquant_qnn import (
    PrecisionPlan,
    SensitivityRow,
    SensitivityTable,
    apply_precision,
    precision_groups,
    quantize_model,
    sensitivity,
)
from bevquant_quantizers import calibrate

sys.path.insert(0, str(Path(__file__).parent))
from two_ranks import on_two_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")


def plain_loop(model, batches, call, score, *, on):
    """Full runs: each group alone switched `on` (the rest off), or alone off (the rest on)."""
    groups = precision_groups(model)
    before = {q: q._disabled for group in groups for q in group.quantizers}
    scores = []
    with torch.no_grad():
        for chosen in groups:
            for q in before:
                q._disabled = (q in chosen.quantizers) != on
            scores.append(score([call(model, batch) for batch in batches]))
    for q, off in before.items():
        q._disabled = off
    return scores


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


def probe(output, batch):
    """A number that hangs on every bit of the output."""
    return math.fsum(float((t.double() * 1.7).sin().sum()) for t in leaves(output))


def total(outputs):
    return math.fsum(probe(output, None) for output in outputs)


def check_equal(model, batches, call=lambda model, batch: model(batch)):
    table = sensitivity(model, batches, probe, forward=call, reduce=math.fsum)
    alone = plain_loop(model, batches, call, total, on=True)
    without = plain_loop(model, batches, call, total, on=False)
    assert [row.alone["int8"] for row in table] == alone
    assert [row.without for row in table] == without
    assert len(set(alone)) > 1
    with torch.no_grad():
        assert table.quantized_score == total([call(model, batch) for batch in batches])


@pytest.mark.parametrize("name", ["ResNetFPN", "SwinNet"])
def test_equals_the_plain_loop_on_dense_nets(nets, name):
    # In-place ReLUs and additions, a concatenating neck, attention in functions.
    net = getattr(nets, name)().eval()
    batches = [torch.randn(1, 3, 64, 64) for _ in range(2)]
    model = quantize_model(net, example_inputs=batches[0]).model
    calibrate(model, batches)
    check_equal(model, batches)


def test_equals_the_plain_loop_on_a_sparse_net(sparse_nets):
    net = sparse_nets.SparseEncoder().eval()
    coordinates = (torch.rand(1, 16, 16, 17) < 0.05).nonzero().int()
    batch = (torch.randn(len(coordinates), 5), coordinates, 1)
    model = quantize_model(net, example_inputs=batch).model
    calibrate(model, [batch])
    check_equal(model, [batch], lambda model, batch: model(*batch))


class Aliases(nn.Module):
    """Everything that would go wrong if outputs were handed out without care."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(4, 4, 1)
        self.same, self.relu = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.first(x)
        z = self.same(y)
        z += 0.5  # changes y too
        left = self.second(y)
        kept = left[:, :2]
        self.relu(left)  # changes kept too
        return self.last(left + y) + kept.mean(), left


def test_values_changed_in_place_are_those_of_a_full_run():
    images = torch.randn(2, 3, 6, 6)
    model = quantize_model(Aliases().eval(), example_inputs=images).model
    calibrate(model, [images])
    check_equal(model, [images])


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.convolutions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.convolutions += func.overloadpacket.__name__ == "convolution"
        return func(*args, **(kwargs or {}))


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))
        self.b = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))
        self.head = nn.Conv2d(3, 2, 1)

    def forward(self, x, y):
        return self.head(self.a(x) * self.b(y))


def test_layers_before_and_branches_beside_are_not_run_again():
    batch = (torch.randn(1, 3, 8, 8), torch.randn(1, 3, 8, 8))
    model = quantize_model(TwoBranches().eval(), example_inputs=batch).model
    calibrate(model, [batch])
    with Counted() as seen:
        sensitivity(model, [batch], without=False)
    # The count of operations and the record run all 7; then 3 + 2 + 1 of a branch and the head
    # behind each, twice, and the head alone.
    assert seen.convolutions == 7 + 7 + 2 * (3 + 2 + 1 + 3) + 1
    assert len(precision_groups(model)) == 7


def test_a_run_ends_at_the_outputs_asked_for():
    batch = (torch.randn(1, 3, 8, 8), torch.randn(1, 3, 8, 8))
    model = quantize_model(TwoBranches().eval(), example_inputs=batch).model
    calibrate(model, [batch])
    with Counted() as seen:
        table = sensitivity(model, [batch], outputs=["a"], without=False)
    assert seen.convolutions == 7 + 7 + (3 + 2 + 1)
    assert table["b.0"].alone["int8"] == table.float_score  # never reaches a
    assert table["a.0"].alone["int8"] < 80
    model.head.weird = nn.Identity()
    with pytest.raises(ValueError, match=r"does not call head\.weird"):
        sensitivity(model, [batch], outputs=["head.weird"])


def small(**config):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    images = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    model = quantize_model(net, example_inputs=images[0]).model
    calibrate(model, images)
    return model, images


def test_sqnr_is_the_ratio_of_powers_over_all_batches():
    model, images = small()
    signal = noise = 0.0
    weight, inputs = model[0].weight_quantizer, model[0].input_quantizer
    for batch in images:
        with torch.no_grad():
            exact = nn.functional.conv2d(batch, model[0].weight, model[0].bias).relu()
            rounded = nn.functional.conv2d(
                inputs(batch), weight(model[0].weight), model[0].bias
            ).relu()
            f, q = (
                nn.functional.conv2d(x, model[2].weight, model[2].bias).double()
                for x in (exact, rounded)
            )
        signal += float((f**2).sum())
        noise += float(((f - q) ** 2).sum())
    table = sensitivity(model, images)
    assert table["0"].alone["int8"] == pytest.approx(10 * math.log10(signal / noise), abs=1e-9)
    assert table["0"].operations == 4 * 8 * 36 * 27
    assert table["2"].operations == 4 * 4 * 36 * 8


def test_kl_is_the_divergence_of_the_softmax_over_axis_1():
    model, images = small()
    with torch.no_grad():
        quantized = [model(batch) for batch in images]
        for q in (q for group in precision_groups(model) for q in group.quantizers):
            q.disable()
        exact = [model(batch) for batch in images]
        for q in (q for group in precision_groups(model) for q in group.quantizers):
            q.enable()
    expected = sum(
        nn.functional.kl_div(
            q.double().log_softmax(1), f.double().softmax(1), reduction="sum"
        ).item()
        for q, f in zip(quantized, exact, strict=True)
    ) / (2 * 4 * 36)
    table = sensitivity(model, images, "kl")
    assert table.quantized_score == pytest.approx(-expected, rel=1e-9)
    assert table.float_score == 0


def test_bits_change_what_is_measured_and_nothing_stays_changed():
    model, images = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    text, held = repr(model), [set(vars(module)) for module in model.modules()]
    table = sensitivity(model, images, precisions=("w4a4", "int4", "int8", "int16"))
    for row in table:
        assert row.alone["w4a4"] < row.alone["int4"] < row.alone["int8"] < row.alone["int16"]
    worst = min(table, key=lambda row: row.alone["int4"])
    assert table.worst_first("int4")[0] is worst
    assert repr(model) == text
    # Another attribute would be another structure, whose graph is captured anew.
    assert [set(vars(module)) for module in model.modules()] == held
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(type(m).__module__ == __name__ for m in model.modules())


def test_a_group_is_measured_at_the_bits_it_has():
    model, images = small()
    apply_precision(model, PrecisionPlan.by_hand(model, {"0": "int16", "2": "int4"}))
    table = sensitivity(model, images)
    assert [set(row.alone) for row in table] == [{"int16"}, {"int4"}]
    assert [row.name for row in table.worst_first()] == ["2", "0"]
    with torch.no_grad():
        quantized = [model(batch) for batch in images]
        apply_precision(model, PrecisionPlan.by_hand(model, {}, "float"))
        exact = [model(batch) for batch in images]
    noise = sum(
        float((q - f).double().square().sum()) for q, f in zip(quantized, exact, strict=True)
    )
    signal = sum(float(f.double().square().sum()) for f in exact)
    assert table.quantized_score == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)
    apply_precision(model, PrecisionPlan.by_hand(model, {}))
    model[0].weight_quantizer.num_bits = 6
    with pytest.raises(ValueError, match=r"0: activations of 8 bits with weights of 6"):
        sensitivity(model, images)


def test_a_metric_of_ones_own_is_reduced_over_batches_in_order():
    model, images = small()
    seen = []

    def reduce(parts):
        seen.append(tuple(parts))
        return float(len(parts))

    table = sensitivity(model, images, lambda output, batch: float(batch.sum()), reduce=reduce)
    assert set(seen) == {tuple(float(batch.sum()) for batch in images)}
    assert table.float_score == 2


def test_quantizers_that_are_off_stay_off():
    model, images = small()
    model[2].input_quantizer.disable()
    model[2].weight_quantizer.disable()
    table = sensitivity(model, images)
    assert [row.name for row in table] == ["0"]
    # Switching off the only group is the float model.
    assert table["0"].without == table.float_score
    assert table["0"].alone["int8"] == table.quantized_score


def test_layers_that_share_a_quantizer_are_one_group(nets):
    net = nets.ResNetFPN().eval()
    model = quantize_model(net, example_inputs=torch.randn(1, 3, 64, 64)).model
    groups = {group.name: set(group.modules) for group in precision_groups(model)}
    assert groups["deeper.0.conv1"] >= {"deeper.0.downsample.0", "deeper.0.conv1"}
    every = [path for modules in groups.values() for path in modules]
    assert len(every) == len(set(every))
    held = [q for group in precision_groups(model) for q in group.quantizers]
    assert len(held) == len(set(held))


def test_rank_correlation_is_spearmans():
    def table(*scores):
        rows = [SensitivityRow((f"l{i}",), 1, {"int8": s}) for i, s in enumerate(scores)]
        return SensitivityTable("sqnr", 200.0, None, tuple(rows), 1)

    one = table(30.0, 50.0, 40.0, 60.0)
    assert one.rank_correlation(table(1.0, 3.0, 2.0, 4.0)) == pytest.approx(1)
    assert one.rank_correlation(table(4.0, 2.0, 3.0, 1.0)) == pytest.approx(-1)
    # Ranks 1 3 2 4 and 1.5 1.5 3 4: products of deviations 3, squares 5 and 4.5.
    assert one.rank_correlation(table(7.0, 7.0, 8.0, 9.0)) == pytest.approx(3 / 22.5**0.5)
    with pytest.raises(ValueError, match="have no order"):
        one.rank_correlation(table(1.0, 1.0, 1.0, 1.0))
    with pytest.raises(KeyError):
        one.rank_correlation(table(1.0, 2.0, 3.0))


def test_table_survives_json(tmp_path):
    model, images = small()
    table = sensitivity(model, images, precisions=("int8", "int16"))
    table.save(tmp_path / "table.json")
    assert SensitivityTable.load(tmp_path / "table.json") == table
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]
    lines = str(table).splitlines()
    assert len(lines) == 2 + len(table.rows)
    assert "int16 alone" in lines[1]
    for broken, message in (
        ("[]", "expected `object`, got `array`"),
        (table.to_json().replace("sensitivity/1", "sensitivity/9"), "schema .*sensitivity/9"),
        (json.dumps({**json.loads(table.to_json()), "float_score": "high"}), "at float_score"),
    ):
        with pytest.raises(ValueError, match=f"SensitivityTable.to_json wrote: {message}"):
            SensitivityTable.from_json(broken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "mse"}, "unknown metric 'mse'"),
        ({"precisions": ("int5",)}, "unknown precisions 'int5'"),
        ({"precisions": ("float",)}, "name precisions other than float"),
        ({"reduce": sum}, "a metric of your own"),
        ({"distributed": True}, "not initialised"),
    ],
)
def test_bad_arguments_are_named(options, message):
    model, images = small()
    with pytest.raises(ValueError, match=message):
        sensitivity(model, images, **options)


def test_models_that_cannot_be_measured_are_refused():
    model, images = small()
    with pytest.raises(ValueError, match="no batches"):
        sensitivity(model, [])
    with pytest.raises(ValueError, match="NaN or infinite"):
        sensitivity(model, [images[0] * math.inf])
    with pytest.raises(ValueError, match="no active quantizer"):
        sensitivity(nn.Sequential(nn.Conv2d(1, 1, 1)), images)
    bare = quantize_model(nn.Sequential(nn.Conv2d(3, 1, 1))).model
    with pytest.raises(ValueError, match="activations of 0 have no range"):
        sensitivity(bare, images)


def on_both(model, images):
    copies = [copy.deepcopy(model) for _ in range(2)]
    return on_two_ranks(lambda rank: sensitivity(copies[rank], images))


def test_two_processes_give_the_table_of_one_and_end_together():
    model, images = small()
    images = [*images, *(torch.randn(2, 3, 8, 8) for _ in range(3))]
    assert on_both(model, images) == [sensitivity(model, images)] * 2
    images[3] = images[3] * math.nan  # dealt to rank 1
    first, second = on_both(model, images)
    assert str(first).startswith("stopped, because another process failed; process 1: ValueError")
    assert "NaN or infinite" in str(second)


class Memory:
    """Keeps results, as text, and counts what is asked of it."""

    def __init__(self):
        self.kept = {}
        self.found = []

    def load(self, step, index):
        known = self.kept.get((step, index))
        if known is not None:
            self.found.append(index)
        return None if known is None else [tuple(pair) for pair in json.loads(known)]

    def save(self, step, index, results):
        self.kept[step, index] = json.dumps(results)


@pytest.mark.parametrize("without", [False, True])
def test_an_interrupted_measurement_goes_on(without):
    model, images = small()
    wanted = sensitivity(model, images, precisions=("int8", "int16"), without=without)
    memory = Memory()
    spoilt = [images[0], images[1] * math.nan]
    options = {"precisions": ("int8", "int16"), "without": without, "kept": memory}
    with pytest.raises(ValueError, match="NaN"):
        sensitivity(model, spoilt, **options)
    assert list(memory.kept) == [("sensitivity", 0)]
    assert sensitivity(model, images, **options) == wanted
    assert memory.found == [0]


def test_of_a_sequence_no_batch_is_made_whose_results_are_kept():
    class Made(Sequence):
        def __init__(self, batches):
            self.batches, self.asked = batches, []

        def __len__(self):
            return len(self.batches)

        def __getitem__(self, index):
            self.asked.append(index)
            return self.batches[index]

    model, images = small()
    made, memory = Made(images), Memory()
    wanted = sensitivity(model, made, without=False, kept=memory)
    assert made.asked == [0, 1]
    assert sensitivity(model, made, without=False, kept=memory) == wanted
    assert made.asked == [0, 1, 0]  # operations are counted on the first


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(4, 7), (4,)), (nn.Linear(4, 7), (5, 4)), (nn.Conv2d(4, 7, 1), (2, 4, 3, 4))],
)
def test_a_divergence_runs_over_the_classes_of_any_output(layer, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    model = quantize_model(nn.Sequential(copy.deepcopy(layer)), example_inputs=x).model
    calibrate(model, [x])
    with torch.no_grad():
        f, q = layer(x).double(), model(x).double()
    axis = min(1, f.dim() - 1)
    wanted = nn.functional.kl_div(
        q.log_softmax(axis), f.log_softmax(axis), reduction="sum", log_target=True
    )
    table = sensitivity(model, [x], "kl", without=False)
    assert table["0"].alone["int8"] == pytest.approx(-float(wanted) / (f.numel() // 7), rel=1e-9)


class Watched(nn.Module):
    """Notes what it makes, and does not hold it; outside of its attributes, which are restored."""

    made: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    def forward(self, x):
        y = self.layers(x)
        self.made.append(weakref.ref(y))
        return y


def test_what_a_recorded_run_holds_goes_where_it_is_let_go():
    x = torch.randn(3, 2)
    model = quantize_model(Watched(), example_inputs=x).model
    calibrate(model, [x])
    sensitivity(model, [x])
    gc.collect()
    model.made.clear()
    gc.disable()  # no circle is looked for
    try:
        sensitivity(model, [x])
        assert len(model.made) > 3
        assert not any(ref() is not None for ref in model.made)
    finally:
        gc.enable()
