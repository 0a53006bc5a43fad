import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "packages" / "quantizers.md"


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "ranges.json").is_file()
    assert capsys.readouterr().out


def test_every_public_name_is_described():
    import bevquant_quantizers

    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in bevquant_quantizers.__all__ if f"`{name}`" not in text] == []


def test_every_named_test_exists():
    text = PAGE.read_text(encoding="utf-8")
    tests = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)", text)
    assert len(named) > 15
    missing = [name for name in named if f"def {name}" not in tests and name != "test_weights"]
    assert missing == []
