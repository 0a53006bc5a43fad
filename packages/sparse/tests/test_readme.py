"""The README's example runs."""

import re
from pathlib import Path

import pytest


def test_example_runs(capsys):
    readme = Path(__file__).resolve().parents[1] / "README.md"
    if not readme.is_file():
        pytest.skip("README.md is not beside the tests")
    example = re.search(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example.group(1), str(readme), "exec"), {})
    assert "torch.Size([1, 8, 4, 4])" in capsys.readouterr().out
