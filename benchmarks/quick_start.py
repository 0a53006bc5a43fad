"""README's quick start, on one thread: the file's time beside float32 in ONNX Runtime.

    python benchmarks/quick_start.py

The blocks of Python of that section run as they stand, in a folder of their own.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import torch
from _machine import print_machine

README = Path(__file__).parent.parent / "README.md"


def main() -> None:
    torch.set_num_threads(1)
    print_machine(peaks=False)
    _, _, section = README.read_text(encoding="utf-8").partition("## Quick start")
    found = re.findall(r"^```python\n(.*?)^```", section.partition("\n## ")[0], re.S | re.M)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec(compile("".join(found), str(README), "exec"), {"__name__": "readme"})


if __name__ == "__main__":
    main()
