"""The README's example runs."""

import re
from pathlib import Path


def test_example(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (folding,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(folding, {})
    printed = capsys.readouterr().out
    assert "6  kept    follows 5 (ReLU), not a convolution or linear layer" in printed
    assert printed.endswith("Identity()\n")
