"""The estimate: counts against the vendor's published ones, times against arithmetic by hand."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.ao.quantization import DeQuantStub, QuantStub

from bevquant_hybrid.operators import OperatorCall, trace_calls
from bevquant_hybrid_tools.performance import (
    ChipFigures,
    Figure,
    count_operations,
    count_traffic,
    estimate_layers,
    estimate_performance,
    load_chip_figures,
    render_layers,
)


class Inverted(nn.Module):
    """A block of MobileNetV2: expand, depthwise, project, and a residual where shapes allow."""

    def __init__(self, inputs, outputs, stride, expand):
        super().__init__()
        hidden = inputs * expand
        self.residual = stride == 1 and inputs == outputs
        first = [] if expand == 1 else [nn.Conv2d(inputs, hidden, 1), nn.ReLU6()]
        self.conv = nn.Sequential(
            *first,
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, outputs, 1),
        )

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


def mobilenet():
    settings = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1)]
    layers, width = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU6()], 32
    for expand, outputs, repeats, stride in [*settings, (6, 160, 3, 2), (6, 320, 1, 1)]:
        for i in range(repeats):
            layers.append(Inverted(width, outputs, stride if i == 0 else 1, expand))
            width = outputs
    return nn.Sequential(*layers, nn.Conv2d(320, 1280, 1), nn.ReLU6(), nn.Flatten(),
                         nn.Linear(1280, 10))  # fmt: skip


# "ops" of the layers in the vendor's report on MobileNetV2, batch 256, 32x32: see the source of
# the BAYES bandwidth in figures.toml.
PUBLISHED = [
    *(113246208, 37748736, 67108864, 201326592, 28311552, 75497472, 113246208, 42467328),
    *(113246208, 113246208, 10616832, 37748736, 50331648, 14155776, 50331648, 50331648),
    *(14155776, 50331648, 50331648, 3538944, 25165824),
    *[50331648, 7077888, 50331648] * 3,
    *(50331648, 7077888, 75497472),
    *[113246208, 10616832, 113246208] * 2,
    *(113246208, 2654208, 47185920),
    *[78643200, 4423680, 78643200] * 2,
    *(78643200, 4423680, 157286400, 209715200, 6553600),
]


def test_operations_are_those_of_the_published_report():
    calls = trace_calls(mobilenet(), torch.zeros(256, 3, 32, 32), input_dtype="qint8")
    counts = [count_operations(call) for call in calls]
    assert [count for count in counts if count] == PUBLISHED
    summary = estimate_performance(calls, "bayes")["summary"]
    assert summary["BPU OPs per run (effective)"] == 3135963136
    assert summary["BPU OPs per frame (effective)"] == 12249856
    assert summary["frame per run"] == 256
    assert summary["input features"][1] == ["arg0", "256x32x32x3"]


def test_time_falls_short_of_the_published_report_as_far_as_the_module_says():
    calls = trace_calls(mobilenet(), torch.zeros(256, 3, 32, 32), input_dtype="qint8")
    summary = estimate_performance(calls, "bayes")["summary"]
    assert summary["latency (ms)"] == pytest.approx(6.7, abs=0.05)
    assert summary["DDR bytes per run"] < 359_319_552
    assert summary["DDR bytes per run"] == sum(t.loaded + t.stored for t in count_traffic(calls))


def call(path, operator, inputs, attributes=None, shape=(1, 8, 4, 4), out=None, **fields):
    fields = {"output_dtype": "qint8", "input_dtypes": ("qint8",) * len(inputs), **fields}
    return OperatorCall(
        *(path, f"torch.nn.{operator}", attributes or {}),
        input_shapes=(shape,) * len(inputs),
        output_shape=out or shape,
        inputs=inputs,
        **fields,
    )


CONV = {"in_channels": 8, "out_channels": 8, "kernel_size": (3, 3), "groups": 1}


def conv(path, source, **fields):
    return call(path, "Conv2d", (source,), CONV, weight_count=576, bias_count=8, **fields)


def add(path, *sources):
    return dataclasses.replace(call(path, "add", sources), operator="torch.add")


def test_what_follows_a_layer_alone_is_computed_with_it():
    calls = [
        conv("a", ""),
        call("bn", "BatchNorm2d", ("a",), weight_count=8, bias_count=8),
        add("sum", "bn", ""),
        call("relu", "ReLU", ("sum",)),
        conv("b", "relu"),
        call("silu", "SiLU", ("b",)),
    ]
    found = [(t.loaded, t.stored, t.fused_into) for t in count_traffic(calls)]
    weights = 576 + 4 * 8
    assert found == [
        (128 + weights, 128, ""),
        (0, 0, "a"),
        (128, 0, "a"),  # the other operand
        (0, 0, "a"),
        (128 + weights, 128, ""),
        (128, 128, ""),
    ]


def test_what_has_two_readers_is_written_down():
    calls = [conv("a", ""), call("relu", "ReLU", ("a",)), conv("b", "a")]
    assert [t.fused_into for t in count_traffic(calls)] == ["", "", ""]
    assert count_traffic(calls)[1].loaded == 128


def test_wide_dtypes_move_more_bytes_and_views_none():
    wide = conv("a", "", input_dtypes=("qint16",), output_dtype="qint32")
    view = dataclasses.replace(call("view", "x", ("a",)), operator="torch.Tensor.reshape")
    first, second = count_traffic([wide, view])
    assert (first.loaded, first.stored) == (256 + 576 + 32, 512)
    assert (second.loaded, second.stored) == (0, 0)


@pytest.mark.parametrize(
    ("operator", "attributes", "fields", "operations"),
    [
        ("ConvTranspose2d", {**CONV, "kernel_size": 2, "out_channels": 4, "groups": 2},
         {"out": (1, 4, 8, 8)}, 2 * 128 * 2 * 4),
        ("Conv3d", {**CONV, "kernel_size": (3, 1, 1)},
         {"shape": (1, 8, 2, 2, 2)}, 2 * 64 * 8 * 3),
        ("Linear", {"in_features": 4, "out_features": 5}, {"out": (1, 8, 4, 5)}, 2 * 160 * 4),
        ("AvgPool2d", {"kernel_size": 2}, {}, 0),
        ("LSTMCell", {}, {"shape": (3, 8), "out": (3, 8), "weight_count": 512}, 2 * 3 * 512),
    ],
)  # fmt: skip
def test_operations_by_hand(operator, attributes, fields, operations):
    assert count_operations(call("x", operator, ("",), attributes, **fields)) == operations


def test_matrix_products_and_attention_count_their_products():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, bias=False)

        def forward(self, x):
            return self.attention(x, x, x)[0] @ torch.ones(8, 3)

    attention, product = trace_calls(Model(), torch.ones(5, 2, 8), input_dtype="qint8")
    projections, scores, sums = 4 * 10 * 8 * 8, 2 * 5 * 5 * 8, 2 * 5 * 5 * 8
    assert count_operations(attention) == 2 * (projections + scores + sums)
    assert count_operations(product) == 2 * 10 * 8 * 3


def chip(tops=1.0, cores=2, bandwidth=1.0):
    figures = (Figure(value, "assumed", "", "") for value in (tops, cores, bandwidth))
    return ChipFigures("chip", *figures)


def test_time_is_the_longer_of_computing_and_moving():
    [layer] = estimate_layers([conv("a", "")], "bayes", figures=chip(tops=1e-6, bandwidth=1e-6))
    operations, moved = 2 * 128 * 72, 128 + 576 + 32 + 128
    assert layer.compute_seconds == pytest.approx(operations / 0.5e6)  # one core of two
    assert layer.memory_seconds == pytest.approx(moved / 1e3)
    assert layer.seconds == layer.memory_seconds
    assert layer.bound == "memory"
    assert layer.intensity == pytest.approx(operations / moved)
    [fast] = estimate_layers([conv("a", "")], "bayes", figures=chip(tops=1e-9, bandwidth=1e-6))
    assert fast.bound == "compute"
    [shared] = estimate_layers([conv("a", "")], "bayes", cores=2, figures=chip(tops=1e-9))
    assert shared.compute_seconds == pytest.approx(fast.compute_seconds / 2)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return self.dequant(self.conv(self.quant(x)))


def test_report_is_labelled_and_adds_up():
    calls = trace_calls(Small(), torch.ones(2, 3, 8, 8))
    report = estimate_performance(calls, "bernoulli2", name="small", layer_details=True)
    summary = report["summary"]
    assert summary["BPU march"] == "BERNOULLI2"
    assert "not a measurement" in summary["estimate"]
    assert summary["figures"]["peak_tops"]["source"].startswith("https://")
    head, *rows = summary["layer details"]
    assert head == ["layer", "ops", "computing cost (no DDR)", "load/store cost"]
    assert [row[0] for row in rows] == ["quant", "conv", "dequant"]
    assert rows[1][1] == f"{summary['BPU OPs per run (effective)']:,}"
    assert summary["DDR bytes per run"] == (
        summary["loaded bytes per run"] + summary["stored bytes per run"]
    )
    assert summary["FPS"] == pytest.approx(2e6 / summary["latency (us)"], rel=0.1)
    assert json.loads(json.dumps(report)) == report
    assert "layer details" not in estimate_performance(calls, "bayes-e")["summary"]


def test_table_of_layers_has_a_total():
    layers = estimate_layers(trace_calls(Small(), torch.ones(2, 3, 8, 8)), "bayes-e")
    lines = render_layers(layers).splitlines()
    assert len(lines) == 1 + 3 + 1 + 1
    assert f"{2 * 2 * 8 * 36 * 27:,}" in lines[-2]


def test_float_calls_and_missing_cores_are_refused():
    calls = trace_calls(nn.Sequential(nn.Conv2d(3, 8, 3)), torch.ones(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"0 \(torch.nn.Conv2d\) reads float32"):
        estimate_performance(calls, "bayes")
    with pytest.raises(ValueError, match=r"cores=2; RDK X5 .* has 1"):
        estimate_layers([conv("a", "")], "bayes-e", cores=2)
    with pytest.raises(ValueError, match="nothing to estimate"):
        estimate_performance([], "bayes")


@pytest.mark.parametrize("march", ["bernoulli2", "bayes", "bayes-e"])
def test_every_figure_has_a_source_and_says_what_it_rests_on(march):
    figures = load_chip_figures(march)
    for figure in (figures.peak_tops, figures.cores, figures.ddr_gigabytes_per_second):
        assert figure.source.startswith("https://")
        assert figure.note
        assert figure.basis != "assumed" or "assumed" in figure.note
    with pytest.raises(ValueError, match="march 'x'; expected one of"):
        load_chip_figures("x")
    with pytest.raises(ValueError, match="expected a number above zero"):
        Figure(0, "assumed", "", "")
    with pytest.raises(ValueError, match="basis 'guess'"):
        Figure(1, "guess", "", "")
