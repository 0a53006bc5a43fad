"""The README's examples run."""

import re
from pathlib import Path

import torch
from torch import nn


class MyAdd(nn.Module):
    def forward(self, a, b):
        return a + b


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        out = self.linear(x)
        out += x
        return out


def test_examples(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    folding, rewriting = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(folding, {})
    printed = capsys.readouterr().out
    assert "6  kept    follows 5 (ReLU), not a convolution or linear layer" in printed
    assert printed.endswith("Identity()\n")
    block, x = Block(), torch.ones(2, 3)
    expected = block(x)
    exec(rewriting, {"block": block, "MyAdd": MyAdd})
    assert torch.equal(block(x), expected)
    assert isinstance(block.quant_add, MyAdd)
