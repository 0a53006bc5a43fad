"""The document on eager mode: its script, run from its own text on real digits to the end."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import sys
import types
import warnings
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

import bevquant_hybrid as horizon
from bevquant_hybrid import runtime
from bevquant_hybrid.nn import qat

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

TRAINED_ON, BATCH = 2560, 32  # of 10,000 digits; the last 1,000 are tested on


def indented(listing: str) -> str:
    """A listing with the indentation that the text has lost, without prose and remarks."""
    lines = [""]
    level = depth = 0
    for line in listing.splitlines():
        code = line.strip()
        if not code or not code[0].isascii() or code.startswith("#"):
            continue
        if depth == 0:
            if code.startswith(("class ", "def ")):
                level = int(code.startswith("def ") and "(self" in code)
            elif re.match(_TOP, code):
                level = 0
            elif re.match(_AFTER_BLOCK, code) or code == lines[-1].strip() == "return top1, top5":
                level = 1
        lines.append("    " * level + code)
        depth += sum(map(code.count, "([{")) - sum(map(code.count, ")]}"))
        level += depth == 0 and code.endswith(":")
    return "\n".join(lines)


def between(text: str, start: str, end: str) -> str:
    begin = text.index(start)
    return text[begin : text.index(end, begin)]


# What stands at the top, and what follows a block within a function: the text tells no more.
_TOP = (
    r"(train_batch_size|test_batch_size|epoch_num|neval_batches|model_file|criterion|data_loader"
    r"|test_loader|quantized_model|float_model) =|(float_model|horizon\.march|qat_model\.fuse)[._]"
    r"|qat_model = load_model"
    r"|(train_float_model|load_and_prepare_qat_model|quantization_training"
    r"|compile_quantized_model)\(torch"
)
_AFTER_BLOCK = r"return res$|torch\.save\(|horizon\.quantization\.compile_model\("


def shortened(script: str) -> str:
    """The script on a CPU, with a rate at which a few hundred digits suffice."""
    for old, new in (
        ("horizon_plugin_pytorch", "bevquant_hybrid"),
        ("device('cuda')", "device('cpu')"),
        ("train_batch_size = 16", f"train_batch_size = {BATCH}"),
        ("lr=0.001, momentum=0.1", "lr=0.1, momentum=0.9"),
        ("lr=0.0001", "lr=0.01"),
    ):
        assert old in script, old
        script = script.replace(old, new)
    return script


class Digits(torch.utils.data.Dataset):
    """Stands in for torchvision's MNIST: the same digits, from a folder."""

    def __init__(self, folder, train: bool, transform) -> None:
        images = gzip.open(folder / "t10k-images-idx3-ubyte.gz").read()[16:]
        labels = gzip.open(folder / "t10k-labels-idx1-ubyte.gz").read()[8:]
        part = slice(0, TRAINED_ON) if train else slice(9000, None)
        self.images = np.frombuffer(images, np.uint8).reshape(-1, 28, 28)[part]
        self.labels = np.frombuffer(labels, np.uint8)[part].astype(np.int64)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.transform(self.images[index]), self.labels[index]


def torchvision_of(folder) -> types.ModuleType:
    """The part of torchvision that the script imports."""

    def compose(steps):
        def transform(image):
            for step in steps:
                image = step(image)
            return image

        return transform

    module = types.ModuleType("torchvision")
    module.transforms = types.SimpleNamespace(
        Compose=compose,
        ToTensor=lambda: lambda image: torch.from_numpy(image[None] / np.float32(255)),
        Normalize=lambda mean, std: lambda image: (image - mean[0]) / std[0],
    )
    module.datasets = types.SimpleNamespace(
        MNIST=lambda root, train, download, transform: Digits(folder, train, transform)
    )
    return module


@pytest.fixture(scope="module")
def run(document, real_data, tools, tmp_path_factory):
    """What the script leaves behind: its names, what it printed, its folder."""
    digits = real_data / "mnist_t10k"
    if not digits.is_dir():
        pytest.skip(f"no digits in {digits}")
    script = between(document("001"), "import torch\nimport torch.optim", "支持的公版算子")
    names: dict = {}
    printed = io.StringIO()
    folder = tmp_path_factory.mktemp("digits")
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.random.fork_rng(),
        contextlib.redirect_stdout(printed),
    ):
        patch.chdir(folder)
        patch.setitem(sys.modules, "torchvision", torchvision_of(digits))
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            exec(shortened(indented(script)), names)
    return types.SimpleNamespace(names=names, printed=printed.getvalue(), folder=folder)


def lines_of(module) -> list[str]:
    return [line.strip() for line in str(module).splitlines()]


def test_the_printed_fused_module_is_the_documents(document) -> None:
    text = document("001")
    shown = text[text.index("print(float_model)") :].splitlines()[1:9]
    wanted = [line.removeprefix("#").strip() for line in shown]
    assert wanted[0] == "ConvBNReLU("
    listing = between(text, "import torch\nfrom torch import nn\nimport hor", "print(float_model)")
    names: dict = {}
    exec(indented(listing).replace("horizon_plugin_pytorch", "bevquant_hybrid"), names)
    assert lines_of(names["float_model"]) == wanted


def test_every_step_of_the_script_says_that_it_succeeded(run) -> None:
    steps = [
        "float training Epoch 0",
        "float evaluation accuracy on 16 images",
        "After preparation for QAT, note fake-quantization modules",
        "QAT Epoch 0",
        "Traced : int evaluation accuracy on 16 images",
        "This model is supported!\nHBDK model check PASS\n",
        "hbdk_model/model.hbm holds",
        "An estimate from public figures, not a measurement.\n",
    ]
    places = [run.printed.index(step) for step in steps]
    assert places == sorted(places)


def test_layers_were_fused_and_replaced_as_the_document_says(run) -> None:
    model = run.names["qat_model"]
    assert type(model.conv0[0]) is type(model.conv1[0]) is qat.ConvReLU2d
    assert type(model.conv0[1]) is type(model.conv0[2]) is torch.nn.Identity
    assert type(model.classifier.conv) is qat.Conv2d
    assert model.classifier.conv.activation_post_process is None  # 32 bits leave the BPU
    assert model.quant.activation_post_process.scale.item() == 1 / 128


def accuracy(run, model) -> tuple[float, torch.Tensor]:
    """Share of the held-out digits that a model reads rightly, and all its answers."""
    names = run.names
    with torch.no_grad():
        loader = torch.utils.data.DataLoader(names["test_loader"].dataset, batch_size=250)
        pairs = [(model(images).view(-1, 10), labels) for images, labels in loader]
    answers = torch.cat([answer for answer, _ in pairs])
    labels = torch.cat([label for _, label in pairs])
    return (answers.argmax(1) == labels).float().mean().item(), answers


def test_digits_are_read_and_integers_read_them_as_training_did(run) -> None:
    trained, converted = run.names["qat_model"], run.names["quantized_model"]
    horizon.quantization.set_fake_quantize(trained, horizon.quantization.FakeQuantState.VALIDATION)
    right, answers = accuracy(run, trained.eval())
    assert right > 0.6  # six seeds gave 0.78 to 0.86; chance gives 0.1
    right_in_integers, integers = accuracy(run, converted)
    assert abs(right_in_integers - right) <= 0.01
    # A step of the last layer's input moves an answer by its weight; ties may fall either way.
    step = trained.avg_pool.activation_post_process.scale.item()
    gain = trained.classifier.conv.weight.abs().sum((1, 2, 3)).max().item()
    assert (integers - answers).abs().max().item() <= 2 * step * gain


def test_the_check_fails_on_bernoulli2_for_the_pool_of_eight(run, capsys) -> None:
    example = torch.ones(1, 1, 28, 28)
    check_model = horizon.quantization.check_model
    assert check_model(run.names["quantized_model"], example, advice=1) == 0
    assert check_model(run.names["quantized_model"], example, march="bernoulli2") == 1
    out = capsys.readouterr().out
    assert "1 condition of BERNOULLI2 is not met" in out
    row = re.search(r"^avg_pool +(\S+) +(\S+) +(\S+) +(.*?)  ", out, re.MULTILINE)
    assert row.groups() == ("torch.nn.AvgPool2d", "kernel_size", "8", "1 <= kernel_size <= 7")


def test_the_compiled_file_answers_as_the_converted_model(run) -> None:
    compiled = runtime.load(run.folder / "hbdk_model" / "model.hbm")
    for image, _ in [run.names["test_loader"].dataset[i] for i in range(40)]:
        assert torch.equal(compiled(image[None]), run.names["quantized_model"](image[None]))


def test_the_files_of_the_script_are_there(run) -> None:
    folder = run.folder / "hbdk_model"
    assert sorted(p.name for p in folder.iterdir()) == [
        "Net.html",
        "Net.json",
        "model.hbm",
        "model.svg",
    ]
    summary = json.loads((folder / "Net.json").read_text(encoding="utf-8"))["summary"]
    convolutions = 24 * 24 * 10 * 25 + 8 * 8 * 20 * 250 + 10 * 20
    assert summary["BPU OPs per run (effective)"] == 2 * convolutions
    assert [row[0] for row in summary["layer details"][1:]] == [
        *("quant", "conv0.0", "max_pool", "conv1.0", "avg_pool", "classifier.conv", "dequant"),
    ]
    picture = ET.parse(folder / "model.svg").getroot()
    titles = [e.text.split("\n")[0] for e in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert {"conv0.0", "max_pool", "conv1.0", "avg_pool", "classifier.conv"} <= set(titles)
