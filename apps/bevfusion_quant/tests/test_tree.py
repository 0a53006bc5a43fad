"""The printed trees against the structure of mit-bevfusion's encoder at each stage.

The expectation is written here by hand: nested tuples of (name, class, children). NVIDIA's scripts
call the quantized sparse convolution SparseConvolutionQunat; here it is QuantSparseConvolution. The
weight quantizer's axis is the output channel's: 4 in their RSCK weights, 0 in spconv 2's KRSC.
"""

from __future__ import annotations

import re

import pytest

from bevfusion_quant.cli import main
from bevfusion_quant.commands.tree import tree
from bevfusion_quant.options import Branch

Node = tuple[str, str, tuple["Node", ...]]
INPUT = "8bit fake per-tensor amax=dynamic calibrator=HistogramCalibrator scale=1.0 quant"
WEIGHT = "8bit fake axis=0 amax=dynamic calibrator=MaxCalibrator scale=1.0 quant"


def leaf(name: str, kind: str) -> Node:
    return (name, kind, ())


def quantizer(name: str) -> Node:
    return leaf(f"_{name}_quantizer", "TensorQuantizer")


def conv(name: str, kind: str, stage: str) -> Node:
    if stage != "quantized":
        return leaf(name, kind)
    return (name, "QuantSparseConvolution", (quantizer("input"), quantizer("weight")))


def unit(name: str, kind: str, stage: str) -> Node:
    members = [conv("0", kind, stage)]
    if stage == "float":
        members.append(leaf("1", "BatchNorm1d"))
    members.append(leaf(str(len(members)), "ReLU"))
    return (name, "SparseSequential", tuple(members))


def block(name: str, stage: str) -> Node:
    members = []
    for half in "12":
        members.append(conv(f"conv{half}", "SubMConv3d", stage))
        if stage == "float":
            members.append(leaf(f"bn{half}", "BatchNorm1d"))
    members.append(leaf("relu", "ReLU"))
    if stage == "quantized":
        members.append(("quant_add", "QuantAdd", (quantizer("input"),)))
    return (name, "SparseBasicBlock", tuple(members))


def encoder(name: str, stage: str) -> Node:
    layers = []
    for number in range(1, 5):
        members = [block("0", stage), block("1", stage)]
        if number < 4:
            members.append(unit("2", "SparseConv3d", stage))
        layers.append((f"encoder_layer{number}", "SparseSequential", tuple(members)))
    return (
        name,
        "SparseEncoder",
        (
            unit("conv_input", "SubMConv3d", stage),
            ("encoder_layers", "SparseSequential", tuple(layers)),
            unit("conv_out", "SparseConv3d", stage),
        ),
    )


def expected(stage: str) -> Node:
    if stage != "float":
        return encoder("", stage)
    return ("", "ModuleDict", (leaf("voxelize", "Voxelization"), encoder("backbone", stage)))


def parse(text: str) -> Node:
    """A printed module tree: a child is indented by two more than its parent."""
    root: list = ["", "", []]
    open_at = {-2: root}
    for line in text.splitlines():
        found = re.match(r"( *)(?:\((\w+)\): )?(\w+)\(", line)
        if found:
            depth = len(found[1])
            node: list = [found[2] or "", found[3], []]
            open_at[depth - 2][2].append(node)
            open_at[depth] = node

    def frozen(node: list) -> Node:
        return (node[0], node[1], tuple(frozen(child) for child in node[2]))

    (only,) = root[2]
    return frozen(only)


@pytest.mark.parametrize("stage", ["float", "fused", "quantized"])
def test_tree_has_the_structure_of_its_stage(
    stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", "--branch", "lidar", "--stage", stage]) == 0
    assert parse(capsys.readouterr().out) == expected(stage)


def test_float_tree_prints_voxelization_and_norms_as_mit_bevfusion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["tree"]) == 0
    out = capsys.readouterr().out
    assert (
        "(voxelize): Voxelization(voxel_size=[0.075, 0.075, 0.2], "
        "point_cloud_range=[-54.0, -54.0, -5.0, 54.0, 54.0, 3.0], max_num_points=10, "
        "max_voxels=(120000, 160000), deterministic=True)"
    ) in out
    assert out.count("eps=0.001, momentum=0.01") == 21
    assert out.count("ReLU(inplace=True)") == 5 + 8


def test_quantizer_lines_are_those_of_an_uncalibrated_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["tree", "--stage", "quantized"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"(_input_quantizer): TensorQuantizer({INPUT})") == 21 + 8
    assert out.count(f"(_weight_quantizer): TensorQuantizer({WEIGHT})") == 21
    assert out.count("TensorQuantizer(") == 21 * 2 + 8
    assert out.count("ReLU()") == 5 + 8
    assert "inplace" not in out


def test_parser_sees_names_nesting_and_classes() -> None:
    text = "A(\n  (x): B(\n    (0): C(1, k=(2, 3))\n  )\n  (y): D()\n)"
    assert parse(text) == (
        "",
        "A",
        (("x", "B", (("0", "C", ()),)), ("y", "D", ())),
    )


@pytest.mark.parametrize(
    ("branch", "convolutions"),
    # Stem, four blocks of four, neck, vtransform; one; two chains of two, two deblocks; 21.
    [("camera", 1 + 16 + 4 + 9), ("fuser", 1), ("decoder", 4 + 2), ("lidar", 21)],
)
def test_quantized_tree_of_a_branch(branch: Branch, convolutions: int) -> None:
    # As modules: torch prints equal neighbours once.
    found = [type(m).__name__ for m in tree("quantized", "tiny", branch).modules()]
    assert not any(name.startswith("BatchNorm") for name in found)
    assert not {"Conv2d", "ConvTranspose2d", "SubMConv3d", "SparseConv3d"} & set(found)
    kinds = ("QuantConv2d", "QuantConvTranspose2d", "QuantSparseConvolution")
    assert sum(name in kinds for name in found) == convolutions


def test_whole_trees_have_the_parts_of_mit_bevfusion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", "--branch", "all", "--config", "tiny"]) == 0
    name, kind, parts = parse(capsys.readouterr().out)
    assert (name, kind) == ("", "BEVFusion")
    assert [part[0] for part in parts] == ["encoders", "fuser", "decoder", "heads"]
    encoders = {child[0]: [c[0] for c in child[2]] for child in parts[0][2]}
    assert encoders == {
        "camera": ["backbone", "neck", "vtransform"],
        "lidar": ["voxelize", "backbone"],
    }


def test_the_head_is_quantized_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tree", "--branch", "all", "--stage", "quantized", "--config", "tiny"]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert main([*arguments, "--quantize-head"]) == 0
    assert capsys.readouterr().out.count("TensorQuantizer(") > plain.count("TensorQuantizer(") + 10
    assert main(["tree", "--branch", "fuser", "--quantize-head"]) == 2
    assert "--branch all" in capsys.readouterr().err
