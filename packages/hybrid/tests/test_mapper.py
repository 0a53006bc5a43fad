from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from bevquant_hybrid import mapper
from bevquant_hybrid.march import March, set_march
from bevquant_hybrid.operators import load_support_table
from bevquant_hybrid.quantization import (
    QuantStub,
    get_default_qat_qconfig,
    prepare_qat_fx,
)
from bevquant_hybrid.utils.onnx_helper import export_to_onnx
from bevquant_quantizers import hb_mapper

onnx = pytest.importorskip("onnx")


def exported(folder: Path, hybrid_dict=None, **settings) -> tuple[list[str], str]:
    layers = [nn.Conv2d(2, 2, 1) for _ in range(3)]
    model = nn.Sequential(QuantStub(), layers[0], nn.MaxPool2d(2), layers[1], nn.SELU(), layers[2])
    model.add_module("end", nn.ReLU())
    made = prepare_qat_fx(
        model.eval(), {"": get_default_qat_qconfig()}, hybrid=True, hybrid_dict=hybrid_dict
    ).eval()
    made(torch.randn(1, 2, 4, 4))
    export_to_onnx(made, torch.randn(1, 2, 4, 4), folder / "net.onnx", **settings)
    proto = onnx.load(folder / "net.onnx")
    onnx.checker.check_model(proto)
    assert {entry.domain for entry in proto.opset_import} == {""}
    return [n.name for n in proto.graph.node], (folder / "net.yaml").read_text()


def test_what_must_run_on_the_cpu_is_not_listed(tmp_path) -> None:
    names, settings = exported(tmp_path)
    assert any(name.startswith("Selu_") for name in names)
    assert "run_on_cpu" not in settings
    assert 'march: "bayes"' in settings


def test_what_the_user_put_there_is_listed_by_its_name_in_the_file(tmp_path) -> None:
    set_march(March.BAYES_E)
    names, settings = exported(tmp_path, {"module_name": ["2"], "module_type": [nn.SELU]})
    pool = next(name for name in names if name.startswith("MaxPool"))
    assert f'run_on_cpu: "{pool}"' in settings
    assert 'march: "bayes-e"' in settings


def test_exporters_know_the_marches_of_the_mapper(monkeypatch) -> None:
    table = load_support_table().marches
    assert hb_mapper.marches() == mapper.marches() == tuple(n for n in table if table[n].hb_mapper)
    assert "bayes-e" in mapper.marches()
    assert "nash-e" not in mapper.marches()
    monkeypatch.setattr("bevquant_quantizers.plugins.entry_points", lambda **_: [])
    assert hb_mapper.marches() == ()


def test_the_mapper_runs_where_there_is_one(tmp_path, monkeypatch) -> None:
    config = mapper.write_config(tmp_path / "net.onnx", "bayes", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"hb_mapper is not on the PATH.*-c net\.yaml"):
        mapper.makertbin(config)
    with pytest.raises(FileNotFoundError, match="write_config"):
        mapper.makertbin(tmp_path / "other.yaml")
    program = tmp_path / "hb_mapper"
    program.write_text('#!/bin/sh\necho "$@" > called\n')
    program.chmod(0o755)
    mapper.makertbin(os.path.relpath(config))
    assert (tmp_path / "called").read_text() == "makertbin -c net.yaml --model-type onnx\n"
    program.write_text("#!/bin/sh\necho out of disk\nexit 3\n")
    with pytest.raises(RuntimeError, match=r"failed with 3:\nout of disk"):
        mapper.makertbin(config)


@pytest.mark.parametrize("named", [True, False])
def test_a_layer_without_a_qconfig_is_listed_where_its_input_is_quantized(tmp_path, named) -> None:
    layers = [nn.Conv2d(2, 2, 1) for _ in range(3)]
    model = nn.Sequential(QuantStub(), *layers[:2], nn.SELU(), layers[2]).eval()
    settings = {"": get_default_qat_qconfig(), "module_name": {"2": None, "4": None}}
    hybrid_dict = {"module_name": ["2", "4"]} if named else None
    made = prepare_qat_fx(model, settings, hybrid=True, hybrid_dict=hybrid_dict).eval()
    x = torch.randn(1, 2, 4, 4)
    made(x)
    export_to_onnx(made, x, tmp_path / "net.onnx")
    convs = [n.name for n in onnx.load(tmp_path / "net.onnx").graph.node if n.op_type == "Conv"]
    assert f'run_on_cpu: "{convs[1]}"\n' in (tmp_path / "net.yaml").read_text()
