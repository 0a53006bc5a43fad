"""Options: the lists of names are their owners', the configurations are in the commands."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from bevfusion.detectors import DETECTORS
from bevfusion.model import PARTS
from bevfusion.quantization import sensitivity_output
from bevfusion_quant import options
from bevfusion_quant.bpu import BpuConfig
from bevfusion_quant.commands.ptq import Ptq
from bevfusion_quant.commands.training import Qat, Train
from bevfusion_quant.options._choices import unknown_name
from bevfusion_quant.ptq import PtqConfig
from bevfusion_quant.qat import QatConfig
from bevfusion_quant.stages import is_detector
from bevfusion_quant.train import TRAINED_BRANCHES, TrainConfig
from bevquant_int8sim import backend_report
from bevquant_qnn import PlannedGroup, round_weights
from bevquant_quantizers import calibrate
from bevquant_sparse import WeightLayout


def listed(error: pytest.ExceptionInfo[ValueError]) -> set[str]:
    """The names at the end of a refusal."""
    return set(re.split(r", ", str(error.value).rpartition(" of ")[2]))


def test_names_of_the_model_are_the_models() -> None:
    assert named(options.ModelName) == set(DETECTORS)
    sizes = (name for kind in DETECTORS.values() for name in kind.configs)
    assert set(get_args(options.ConfigName)) == set(sizes)
    assert get_args(options.PartBranch) == (*PARTS, "all")
    detectors = {name for name in get_args(options.Branch) if is_detector(name)}
    assert detectors == {*get_args(options.Branch)} - {*PARTS}
    assert set(get_args(options.TrainedBranch)) == set(TRAINED_BRANCHES)


def named(choice: Any) -> set[str]:
    """The names that the help has of a choice among what packages bring."""
    return set(get_args(choice)[1].metavar.strip("{}").split(","))


def test_kinds_of_data_are_those_that_the_packages_bring() -> None:
    # In a process of its own: other tests, and examples, register kinds.
    code = (
        "import atexit, gc; gc.disable(); atexit.register(gc.freeze); "  # a quarter of it all
        "import bev_data.datasets as d; d.open_dataset('nope')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    kinds = run.stderr.strip().rpartition("expected one of ")[2].partition(";")[0]
    assert named(options.DatasetKind) == set(kinds.split(", "))
    assert {"street", "pandaset", "kitti", "files", "nuscenes"} <= set(kinds.split(", "))


def test_names_of_other_packages_are_theirs() -> None:
    with pytest.raises(ValueError, match="nope") as unknown:
        calibrate(torch.nn.Linear(1, 1), [], method="nope")
    assert named(options.Method) == listed(unknown)
    rounding = get_type_hints(round_weights)["rounding"]
    assert named(options.Rounding) == set(get_args(rounding))
    precisions = get_args(get_type_hints(PlannedGroup)["precision"])
    blocks = {"mxfp8", "mxfp4", "nvfp4"}  # of linear layers, which the groups here do not have
    assert {*named(options.Precision), "float"} == set(precisions) - blocks
    with pytest.raises(ValueError, match="nope") as unknown:
        sensitivity_output(torch.nn.Identity(), "nope")
    assert set(get_args(options.SensitivityMetric)) == listed(unknown)
    with pytest.raises(ValueError, match=r"nope.*map or heatmap"):
        sensitivity_output(torch.nn.Identity(), "sqnr", "nope")
    assert get_args(options.SensitivityOutput) == ("map", "heatmap")
    backends = {status.name for status in backend_report()}
    assert named(options.Backend) == {"auto", *backends}
    refusal = unknown_name(get_type_hints(Ptq, include_extras=True)["march"], "nope")
    assert named(options.MarchName) == set(refusal.rpartition(" of ")[2].split(", "))
    assert set(get_args(options.WeightLayout)) - {"auto"} <= set(WeightLayout.__members__)


@pytest.mark.skipif(importlib.util.find_spec("onnx") is None, reason="onnx is not installed")
def test_targets_of_files_are_those_of_export() -> None:
    from bevquant_export.targets import CPUS, targets

    names = {name for target in targets() for name in (target.name, *target.aliases)}
    dialects = {target.sparse for target in targets()} - {""}
    assert named(options.ExportTarget) == names - dialects
    assert named(options.Cpu) == set(CPUS)


@pytest.mark.parametrize(
    ("command", "config", "decided"),
    [
        (Ptq(), PtqConfig, {"branch": "lidar", "method": "mse"}),
        (Ptq(), BpuConfig, {"branch": "all", "method": "percentile", "march": "bayes"}),
        (Train(out=Path("runs/x")), TrainConfig, {}),
        (Qat(run=Path("runs/x")), QatConfig, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_command_without_options_is_its_configuration(
    command: Any, config: Any, decided: dict[str, str]
) -> None:
    if "cameras" in {field.name for field in fields(config)}:
        decided = {**decided, "cameras": config().cameras}
    assert options.config_from(config, command, **decided) == config()


def test_options_reach_the_configuration_and_what_is_decided_goes_before() -> None:
    given = Ptq(weight_bits=5, exclude=("a",), method="max", fold=False, runs=Path("elsewhere"))
    made = options.config_from(PtqConfig, given, branch="decoder", cameras=("b",))
    assert made == PtqConfig(
        branch="decoder", cameras=("b",), weight_bits=5, exclude=("a",), method="max", fold=False
    )


def test_options_are_read_without_torch() -> None:
    code = "import sys, bevfusion_quant.commands; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
