"""What READMEs and the documentation show is run as it stands, each page from top to bottom.

Blocks of Python are run, and lines of blocks marked ``sh``; of other blocks the command lines are
held against the commands' own help. Packages whose tests run their README are left out.
"""

from __future__ import annotations

import io
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

import bevquant_qnn

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/*/README.md"))]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def command_lines(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Program, sub-command and options of every command line of ours."""
    found = re.finditer(r"\b(bevfusion-quant|bevfusion_quant|bevquant-lint)\b([^\n;|\"#`]*)", text)
    for program, rest in (m.groups() for m in found):
        words = rest.split()
        command = words[0] if program != "bevquant-lint" and words else ""
        if command.isalpha() or program == "bevquant-lint":
            yield program.replace("_", "-"), command, re.findall(r"(?<!\S)--[\w-]+", rest)


@cache
def main_of(program: str) -> Callable[[Sequence[str]], int]:
    """What a command of ours runs."""
    (found,) = entry_points(group="console_scripts", name=program)
    return found.load()


@cache
def known_options(program: str, command: str) -> frozenset[str]:
    """What a command's help names; the command is refused there if there is none."""
    shown = io.StringIO()
    with pytest.raises(SystemExit) as left, redirect_stdout(shown):
        main_of(program)([command, "--help"] if command else ["--help"])
    assert left.value.code == 0, f"{program} {command}"
    return frozenset(re.findall(r"--[\w-]+", shown.getvalue()))


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in [*READMES, *PAGES]
        if page.parent == ROOT or not (page.parent / "tests" / "test_readme.py").exists()
        if any(language in ("python", "sh") for language, _ in blocks(page))
    ],
    ids=name_of,
)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # spconv's own dense()
def test_examples_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("spconv", reason="spconv is not installed")
    monkeypatch.chdir(tmp_path)
    for layer in (bevquant_qnn.QuantConv2d, bevquant_qnn.QuantLinear):  # a page sets it
        monkeypatch.setattr(layer, "default_quant_desc_input", None)
    names = {"__name__": "readme"}
    for language, block in blocks(page):
        if language == "python":
            exec(compile(block, str(page), "exec"), names)
        elif language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                program, *words = shlex.split(line, comments=True) or [""]
                if program:
                    assert main_of(program)(words) == 0, line
    if page.parent == ROOT:
        printed = capsys.readouterr().out
        assert "2 batch norms folded, 0 kept" in printed
        assert re.search(r"run by bevquant: 0 of \d,\d+ integers are not the model's", printed)
        assert {path.name for path in tmp_path.iterdir()} == {
            "ranges.json",
            "encoder.onnx",
            "net.onnx",
        }
        assert_exact(printed)


def assert_exact(printed: str) -> None:
    """The quick start's file: at most ten lines, and no integer beyond rounding is another."""
    _, quick = (block for language, block in blocks(ROOT / "README.md")[:4] if language == "python")
    assert len(quick.split("\n\n")) == 2
    assert len([line for line in quick.splitlines() if line]) <= 10
    assert re.search(r"[\d.]+ ms, [\d.]+ times as fast as float32", printed)
    found = re.search(r"run by onnxruntime [\d.]+: (\d+) of .* not the model's(.*)", printed)
    assert found
    assert found[1] == "0" or f"; {found[1]} lie between the two" in found[2]


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=name_of)
def test_commands_have_the_options_shown(page: Path) -> None:
    for program, command, options in command_lines(page.read_text(encoding="utf-8")):
        unknown = [o for o in options if o not in known_options(program, command)]
        assert not unknown, f"{program} {command}"


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_has_an_example(page: Path) -> None:
    text = "".join(block for _, block in blocks(page))
    assert any(language == "python" for language, _ in blocks(page)) or list(command_lines(text))


@pytest.mark.parametrize("page", [*READMES, *PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_work_in_the_repository(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s:]+)[^):]*\)", text)
    assert not [link for link in links if not (page.parent / link).exists()]


def test_the_site_links_generated_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import site_hook

    assert all((ROOT / source).exists() for source in site_hook.PAGES)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    text = site_hook.on_page_markdown((ROOT / "docs/index.md").read_text("utf-8"), page)
    assert "[Targets](reference/targets.md)" in text
    page.file.src_uri = "app/bpu.md"
    text = site_hook.on_page_markdown((ROOT / "docs/app/bpu.md").read_text("utf-8"), page)
    assert "](../api/bevquant_hybrid.md)" in text
