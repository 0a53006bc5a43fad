"""The mutations that the tests of every package are tried with: which there are, and which not."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = '''
"""Docstring with 1 + 1."""
from __future__ import annotations

__all__ = ["f"]
_LIMIT = 1 << 14
Pair = tuple[int, int] | None


def f(x: int | None, *rest, y: float = 0.5, **more) -> list[int] | None:
    """Also 2 * 2."""
    if x is None or not rest:
        got = min(x, 7)
        raise ValueError(f"expected {1 + 2}, got {got} " + str(3 * 4))
    for i in range(10):  # 5 + 5
        x -= max(i, y) - rest[-1]
    while x <= 3 and isinstance(x, int | float):
        x = f(*rest, **more) // 2
    return x if x in rest else "a" + "b"
'''


@pytest.fixture(scope="module")
def sites():
    spec = importlib.util.spec_from_file_location("sites", ROOT / "mutation" / "sites.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sites"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sites"]


def test_operators_numbers_and_names_are_mutated_and_words_are_not(sites, tmp_path):
    (tmp_path / "m.py").write_text(SOURCE, encoding="utf-8")
    found = {(m.text.split("  #")[0], m.old, m.new) for m in sites.mutations(tmp_path, "m.py")}
    assert found == {
        ("_LIMIT = 1 << 14", "1", "2"),
        ("_LIMIT = 1 << 14", "<<", ">>"),
        ("_LIMIT = 1 << 14", "14", "15"),
        ("def f(x: int | None, *rest, y: float = 0.5, **more) -> list[int] | None:", "0.5", "1.5"),
        ("if x is None or not rest:", "is", "is not"),
        ("if x is None or not rest:", "or", "and"),
        ("if x is None or not rest:", "not", ""),
        ("for i in range(10):", "10", "11"),
        ("x -= max(i, y) - rest[-1]", "-", "+"),
        ("x -= max(i, y) - rest[-1]", "max", "min"),
        ("x -= max(i, y) - rest[-1]", "1", "2"),
        ("while x <= 3 and isinstance(x, int | float):", "<=", "<"),
        ("while x <= 3 and isinstance(x, int | float):", "3", "4"),
        ("while x <= 3 and isinstance(x, int | float):", "and", "or"),
        ("x = f(*rest, **more) // 2", "//", "*"),
        ("x = f(*rest, **more) // 2", "2", "3"),
        ('return x if x in rest else "a" + "b"', "in", "not in"),
    }


def test_a_mutation_changes_its_token_alone_and_keeps_its_rank(sites, tmp_path):
    file = tmp_path / "m.py"
    file.write_text("a = 1\nü = 2 + 3\n", encoding="utf-8")
    (plus,) = (m for m in sites.mutations(tmp_path, "m.py") if m.old == "+")
    assert plus.apply(file.read_bytes()).decode() == "a = 1\nü = 2 - 3\n"
    assert (plus.line, plus.text, plus.column) == (2, "ü = 2 + 3", 6)
    file.write_text("b = 7\n\n\na = 1\nü = 2 + 3\n", encoding="utf-8")
    (moved,) = (m for m in sites.mutations(tmp_path, "m.py") if m.old == "+")
    assert moved.rank(5) == plus.rank(5) != plus.rank(6)
    with pytest.raises(ValueError, match="has changed"):
        plus.apply(file.read_bytes())


def test_every_named_file_and_test_is_there():
    targets = tomllib.loads((ROOT / "mutation" / "targets.toml").read_text())
    for package, target in targets.items():
        folder = ROOT / "packages" / package
        source = folder / "src" / f"bevquant_{package}"
        assert all([*source.glob(pattern)] for pattern in target["files"]), package
        tests = {test for chosen in (target["all"], *target["tests"].values()) for test in chosen}
        assert not [test for test in tests if not (folder / "tests" / test).is_file()]


def test_equivalent_mutations_exist_and_have_a_reason(sites):
    listed = tomllib.loads((ROOT / "mutation" / "equivalent.toml").read_text())["equivalent"]
    found = {file: sites.mutations(ROOT, file) for file in {entry["file"] for entry in listed}}
    for entry in listed:
        assert entry.keys() - {"column", "new"} == {"file", "text", "reason"}
        assert ("column" in entry) == ("new" in entry)  # one mutation, or all of a line
        assert any(m.is_listed(entry) for m in found[entry["file"]]), entry
        assert len(entry["reason"]) > 20


def test_an_entry_is_about_a_mutation_or_about_its_line(sites, tmp_path):
    (tmp_path / "m.py").write_text("a = 1 + 2\nb = 1 + 2\n", encoding="utf-8")
    line = {"file": "m.py", "text": "a = 1 + 2"}
    found = [*sites.mutations(tmp_path, "m.py")]
    assert sorted(m.old for m in found if m.is_listed(line)) == ["+", "1", "2"]
    assert len(found) == 6
    (one,) = (m for m in found if m.is_listed(line | {"column": 6, "new": "-"}))
    assert (one.line, one.old) == (1, "+")
