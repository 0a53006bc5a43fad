"""What `ptq` can be told about weights, kept in the run and obeyed by all that reads it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from bevfusion_quant._errors import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.integer._simulation import lowered
from bevfusion_quant.ptq import FrameBatches, PtqConfig, load_run, run_ptq
from bevquant_quantizers import TensorQuantizer

sys.path.insert(0, str(Path(__file__).parent))
from bpu_split import TINY, small_frame

if importlib.util.find_spec("spconv") is None:
    pytest.skip("spconv is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder with weights of 4 bits."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:  # pictures are not what this is about
        patch.setattr("bevfusion_quant.ptq._run.write_pictures", lambda *given: [])
        run_ptq(
            [small_frame()], PtqConfig("tiny", "decoder", weight_bits=4), runs=folder, name="four"
        )
    return folder


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights as the quantized layers of a model multiply them."""
    return {
        path: module.weight_quantizer(module.weight).detach()
        for path, module in model.named_modules()
        if isinstance(getattr(module, "_weight_quantizer", None), TensorQuantizer)
    }


def test_weights_have_the_bits_that_the_run_says(runs: Path) -> None:
    assert json.loads((runs / "four/config.json").read_text())["weight_bits"] == 4
    run = load_run(runs / "four")
    for path, weight in weights_of(run.quantized_model).items():
        out_axis = 1 if "deblocks.1" in path else 0
        for channel in weight.movedim(out_axis, 0).flatten(1):
            assert len(channel.unique()) <= 15, path
    batch = FrameBatches([small_frame()], TINY, run.quantized_model)[0]
    model = lowered(run.quantized_model, batch, "auto")
    integers = [step.tensors["weight"] for step in model.steps if step.op.startswith("conv")]
    assert integers
    assert {int(weight.abs().max()) for weight in integers} == {7}


def test_bits_that_are_none_are_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for bits in (3, 9):
        with pytest.raises(InputError, match=f"--weight-bits {bits}: weights have 4 to 8 bits"):
            run_ptq([small_frame()], PtqConfig("tiny", weight_bits=bits), runs=tmp_path)
    config = PtqConfig("tiny", weight_bits=4, plan=tmp_path / "plan.json")
    with pytest.raises(InputError, match="leave one of the two out"):
        run_ptq([small_frame()], config, runs=tmp_path)
    assert main("ptq --target bpu --dataset street --config tiny --weight-bits 4".split()) == 2
    assert "a BPU's weights have 8 bits" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
