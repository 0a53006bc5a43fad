"""Tools are where the documents import them, with the arguments that the documents print."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn

import bevquant_hybrid_tools
from bevquant_hybrid.quantization import QuantStub, check_model
from bevquant_hybrid.stand_in import stand_in

NAMES = {
    "quantization": "perf_model visualize_model visualize_partition",
    "utils.quant_profiler": """check_deploy_device check_qconfig check_unfused_operations
        compare_script_models compare_weights featuremap_similarity get_module_called_count
        get_raw_features model_profiler profile_featuremap script_profile set_preserve_qat_mode
        show_cuda_memory_consumption""",
    "partition": "suggest_cpu CpuMove CpuSuggestion",
    "performance": "estimate_layers estimate_cpu_layers estimate_performance load_chip_figures",
    "drawing": "DrawnNode draw_partition write_partition",
}
# Path: the names and defaults in the documented order; more may follow.
SIGNATURES = {
    "quantization.perf_model": (
        "module, example_inputs, march=None, out_dir='.', name=None, hbm=None, "
        "input_source='ddr', input_layout=None, output_layout='NCHW', opt='O3', balance_factor=2, "
        "progressbar=True, jobs=16, layer_details=False, extra_args=None"
    ),
    "quantization.visualize_model": (
        "module, example_inputs, march=None, save_path=None, show=True"
    ),
    "utils.quant_profiler.script_profile": (
        "model, example_inputs, out_dir=None, march=None, mark_node_func=None, "
        "compare_with_hbdk_parser=True"
    ),
    "utils.quant_profiler.compare_script_models": "model1, model2, example_inputs, march=None",
    "utils.quant_profiler.show_cuda_memory_consumption": (
        "model, example_inputs, device, check_leaf_module=None, out_dir=None, file_name=None, "
        "custom_backward=None"
    ),
}


@pytest.mark.parametrize("path", NAMES)
def test_names_are_where_the_documents_import_them(path: str) -> None:
    module = importlib.import_module(f"bevquant_hybrid.{path}")
    for name in NAMES[path].split():
        assert getattr(module, name).__module__.startswith("bevquant_hybrid_tools."), name
    with pytest.raises(AttributeError, match="no attribute 'nothing_such'"):
        module.nothing_such  # noqa: B018


def written(signature: inspect.Signature, count: int) -> str:
    parts = []
    for name, parameter in list(signature.parameters.items())[:count]:
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = parameter.default
        text = f"'{default}'" if isinstance(default, str) else repr(default)
        parts.append(f"{star}{name}" + ("" if default is parameter.empty else f"={text}"))
    return ", ".join(parts)


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_stand_in_the_documented_order(path: str) -> None:
    home, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(f"bevquant_hybrid.{home}"), name)
    documented = SIGNATURES[path]
    count = documented.count(", ") + 1
    assert written(inspect.signature(found), count) == documented


@pytest.mark.parametrize("path", ["utils.quant_profiler", "performance", "drawing"])
def test_a_documented_module_has_all_names_of_its_tool(path: str) -> None:
    name = path.rpartition(".")[2]
    found = importlib.import_module(f"bevquant_hybrid.{path}").__all__
    assert found == importlib.import_module(f"bevquant_hybrid_tools.{name}").__all__


def test_scripts_that_stay_as_they_are_find_them() -> None:
    stand_in("some_plugin")
    profiler = importlib.import_module("some_plugin.utils.quant_profiler")
    assert profiler.check_qconfig is bevquant_hybrid_tools.quant_profiler.check_qconfig
    names: dict[str, object] = {}
    exec("from some_plugin.utils.quant_profiler import *", names)
    assert names["model_profiler"] is bevquant_hybrid_tools.quant_profiler.model_profiler


def test_without_the_package_its_name_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bevquant_quantizers.plugins.entry_points", lambda **_: [])
    with pytest.raises(ImportError, match=r"\.performance: .* install packages/hybrid_tools"):
        from bevquant_hybrid.performance import estimate_layers  # noqa: F401
    with pytest.raises(ImportError, match=r"\.quantization: .* install packages/hybrid_tools"):
        from bevquant_hybrid.quantization import perf_model  # noqa: F401
    model = nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 1))
    assert check_model(model, torch.rand(1, 3, 8, 8), advice=1) == 0  # as the documents call it
    assert "not estimated: bevquant_hybrid.performance: " in capsys.readouterr().out
