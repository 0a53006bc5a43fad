"""Without any optional library everything is computed too, to the same integers.

One network goes from float to a file twice: in a process in which no optional library can be
imported, and in this one with all that is installed.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

OPTIONAL = (
    "numba", "jaxtyping", "beartype", "tqdm", "spconv", "onnxruntime", "openvino", "onnxscript",
    "matplotlib", "PIL", "pytorch_quantization", "nuscenes", "hypothesis",
)  # fmt: skip
# A quarter of what imports take.
UNSEARCHED = "import atexit, gc; gc.disable(); atexit.register(gc.freeze)"
SCRIPT = """
import hashlib, json, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None  # importing it fails
import torch
from torch import nn
from bevquant_export import export_qdq_onnx, lint_onnx
from bevquant_fusion import fuse_model
from bevquant_graph import capture
from bevquant_int8sim import IntegerModel, int8_sparse_conv, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate, load_ranges, save_ranges
from bevquant_sparse import WeightLayout, build_rulebook, sparse_conv

def digest(*tensors):
    return [hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest() for t in tensors]

torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
made = {}

rows = (torch.rand(1, 9, 8, 7, generator=g) < 0.3).nonzero().int().contiguous()
book = build_rulebook(rows, (9, 8, 7), 3, 2, 1, 1, subm=False, batch_size=1)
x = torch.randint(-9, 9, (len(rows), 16), generator=g)
w = torch.randint(-9, 9, (27, 16, 8), generator=g)
made["rulebook"] = digest(book.out_indices, book.neighbours)
layout = WeightLayout.VCK
made["float"] = digest(sparse_conv(x.float(), w.float(), None, book, layout=layout))
x, w = x.to(torch.int8), w.to(torch.int8)
made["sums"] = digest(int8_sparse_conv(x, w, None, book, layout=layout))

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 4, 1),
)
with torch.no_grad():
    net[1].running_mean.uniform_(-0.3, 0.3, generator=g)
    net[1].running_var.uniform_(0.5, 2.0, generator=g)
image = torch.randn(1, 3, 48, 40, generator=g)
net = net.eval()
assert capture(net, (image,)) is not None
net = fuse_model(net, (image,)).model
quantized = quantize_model(net, example_inputs=image).model
calibrate(quantized, [image], method="mse", progress=False)
folder = sys.argv[2]
save_ranges(quantized, folder + "/ranges.json")
load_ranges(quantized, folder + "/ranges.json")
integers = simulate(quantized, image)
made["integers"] = digest(integers(image))
integers.save(folder + "/model")
assert digest(IntegerModel.load(folder + "/model")(image)) == made["integers"]
file = export_qdq_onnx(quantized, image, folder + "/n.onnx", "onnxruntime")
lint_onnx(folder + "/n.onnx", "onnxruntime")
print(json.dumps([made, file.verified.split()[0]]))
"""


def results(told: str) -> tuple[dict[str, list[str]], str]:
    made, runner = json.loads(told.splitlines()[-1])
    return made, runner


def test_the_same_integers_without_any_optional_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("onnxruntime")
    (tmp_path / "bare").mkdir()
    script = f"{UNSEARCHED}\n{SCRIPT}"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, json.dumps(OPTIONAL), tmp_path / "bare"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    bare, runner = results(run.stdout)
    assert runner == "onnx.reference"

    (tmp_path / "full").mkdir()
    monkeypatch.setattr(sys, "argv", ["-c", "[]", str(tmp_path / "full")])
    threads, told = torch.get_num_threads(), io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(told):
        warnings.simplefilter("ignore")
        exec(SCRIPT, {})
    torch.set_num_threads(threads)
    full, runner = results(told.getvalue())
    assert runner == "onnxruntime"
    assert bare == full
