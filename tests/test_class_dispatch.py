"""Nobody asks for the class of a layer but `layer_class`: a subclass may compute something else.

Every source file is read as a syntax tree, what it compares is evaluated in its module's own names,
and each `isinstance`, `type(m) is`, `type(m) in TABLE`, `TABLE[type(m)]`, `case nn.ReLU()` and
`type(m).__name__ ==` that asks for a layer of torch or spconv is a finding. Containers hold code of
nobody's; the stubs, fake quantizers and `FloatFunctional` of `torch.ao` are protocols, which a
class takes part in by being derived from them, and are left out.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
MEMBERS = sorted(p.parent for p in ROOT.glob("*/*/pyproject.toml"))
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
LIBRARIES = ("torch.nn.modules.", "spconv.")

# Where the bare class is the question. By package and function; each with its reason.
_SHAPE = "how a weight lies in memory or what its shape means, which no forward changes"
_LISTS = "lists or describes modules by name; computes nothing from the answer"
ALLOWED = {
    "bevquant_quantizers._channel_axis": _SHAPE,
    "bevquant_sparse.layout_of": _SHAPE,
    "bevfusion._fan_in": _SHAPE,
    "bevfusion.random_weights": "fits the statistics that a module holds, by running it",
    "bevfusion._fill": "draws the parameters that a module holds, by what they are for",
    "bevfusion_quant.keep_batch_norms": _LISTS,
    "bevquant_hybrid_tools.folded_norms": _LISTS,
    "bevquant_int8sim.layer_calls": "behind attention nothing is taken, whoever's forward it is",
    "bevquant_int8sim._norm_layers": "pairs what `quantize_model` made with what it was made of",
    # bevquant_fusion: `bn_problem` and `conv_problem` have refused code of its own, or a graph
    # tells what that does; what is asked behind them is the kind of numbers at hand.
    "bevquant_fusion.bn_problem": "the first half of a question whose second is `_extras`",
    "bevquant_fusion.is_convolution": "the first half of a question whose second is `_extras`",
    "bevquant_fusion.out_channels": _SHAPE,
    "bevquant_fusion._pair_problem": "asked behind `conv_problem` and `bn_problem`",
    "bevquant_fusion._fold_weights": "asked behind `conv_problem`",
    "bevquant_fusion.Reader.numbers": "asked before `bn_problem`; a graph tells what is computed",
    "bevquant_fusion.plain_layers": "code of its own is what is looked for; a graph tells its use",
    "bevquant_fusion.Reader.channel_axis": "asked behind `conv_problem`",
    "bevquant_fusion.Reader.applies_weights": "a graph tells what is computed",
    "bevquant_fusion.Reader.rest": "asked before `bn_problem`; a graph tells what is computed",
    "bevquant_fusion.plan_fusion": "finds what is reported as folded or left, with the reason",
    "bevquant_fusion.from_structure": "finds what is reported as folded or left, with the reason",
    "bevquant_fusion.activations": "looks for the setting `inplace`, which it asks as well",
    "bevquant_fusion._as_norm": "leaves whatever derives from a batch norm to the plan",
    "bevquant_fusion._is_leaf": "keeps a call one node; `bn_problem` judges it",
    "bevquant_fusion._Reader.region": _LISTS,
    "bevquant_fusion._Reader.served": _LISTS,
    "bevquant_fusion._Reader.below": "which modules are not looked into, as they have no children",
    "bevquant_fusion._Reader.producer": "an Identity is passed, a batch norm behind it refused",
    "bevquant_fusion._Reader.readers": "an Identity is passed, a batch norm behind it refused",
}


def asks_for_layers(value: Any) -> bool:
    """Whether a value is the class of a layer, or holds one."""
    if isinstance(value, type):
        known = f"{value.__module__}.".startswith(LIBRARIES) and issubclass(value, nn.Module)
        return known and value is not nn.Module and value not in CONTAINERS
    if isinstance(value, list | tuple | set | frozenset | dict):
        return any(map(asks_for_layers, value))
    return any(map(asks_for_layers, getattr(value, "__args__", ())))  # a union


NAMES = {name for name, value in vars(nn).items() if asks_for_layers(value)}


class Finder(ast.NodeVisitor):
    """Comparisons with classes of layers, and the functions that they are in."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = dict(names)
        self.scopes: list[str] = []
        self.classes: list[set[str]] = [set()]  # names of variables that hold a `type(x)`
        self.found: list[tuple[str, int, str]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        assigned = [
            n for n in ast.walk(node) if isinstance(n, ast.Assign) and self.is_class(n.value)
        ]
        names = {t.id for n in assigned for t in n.targets if isinstance(t, ast.Name)}
        self.scopes.append(node.name)
        self.classes.append(names)
        self.generic_visit(node)
        self.classes.pop()
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scopes.append(node.name)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
                self.note(node, self.names_layers(classes))
            case ast.Call(func=ast.Attribute(attr="get" | "pop", value=table), args=[key, *_]):
                self.note(node, self.is_class(key) and self.names_layers(table))
            case ast.Call(func=ast.Attribute(attr="register"), args=[cls, *_]):
                self.note(node, self.names_layers(cls))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.note(node, self.is_class(node.slice) and self.names_layers(node.value))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        classes = any(map(self.is_class, sides)) and any(map(self.names_layers, sides))
        named = any(isinstance(s, ast.Attribute) and s.attr == "__name__" and
                    self.is_class(s.value) for s in sides)  # fmt: skip
        self.note(node, classes or (named and any(map(self.spells_layers, sides))))
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.note(node, self.names_layers(node.cls))
        self.generic_visit(node)

    def is_class(self, node: ast.AST) -> bool:
        """`type(x)`, `x.__class__`, or a variable that holds it."""
        match node:
            case ast.Call(func=ast.Name(id="type"), args=[_]) | ast.Attribute(attr="__class__"):
                return True
            case ast.Name(id=name):
                return any(name in names for names in self.classes)
        return False

    def names_layers(self, node: ast.expr) -> bool:
        return asks_for_layers(self.value(node))

    def spells_layers(self, node: ast.expr) -> bool:
        value = self.value(node)
        words = [value] if isinstance(value, str) else value
        return isinstance(words, list | tuple | set | frozenset | dict) and not NAMES.isdisjoint(
            w for w in words if isinstance(w, str)
        )

    def value(self, node: ast.expr) -> Any:
        """What an expression is in the module's own names; None where that cannot be told."""
        if not all(isinstance(n, _PLAIN) for n in ast.walk(node)):
            return None
        try:
            return eval(compile(ast.Expression(node), "source", "eval"), self.names)
        except (NameError, AttributeError, KeyError, TypeError):  # of a function's own variables
            return None

    def note(self, node: ast.AST, is_one: bool) -> None:
        if is_one:
            self.found.append(
                (".".join(self.scopes), getattr(node, "lineno", 0), ast.unparse(node))
            )


_PLAIN = (ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred, ast.BinOp,
          ast.BitOr, ast.Add, ast.Constant, ast.expr_context)  # fmt: skip


def findings(source: str, names: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    finder = Finder(names)
    finder.visit(ast.parse(source))
    return finder.found


def sources(member: Path) -> Iterator[tuple[str, Path]]:
    """Names and files of a member's modules."""
    for path in sorted((member / "src").rglob("*.py")):
        parts = path.relative_to(member / "src").with_suffix("").parts
        if parts[-1] != "__main__":
            yield ".".join(parts).removesuffix(".__init__"), path


@pytest.mark.parametrize("member", [m for m in MEMBERS if m.name != "qnn"], ids=lambda m: m.name)
def test_only_one_function_asks_for_the_class_of_a_layer(member: Path) -> None:
    wrong, packages, found = [], set(), set()
    for name, path in sources(member):
        package = name.split(".")[0]
        packages.add(package)
        for scope, line, text in findings(path.read_text(), vars(importlib.import_module(name))):
            found.add(f"{package}.{scope}")
            if f"{package}.{scope}" not in ALLOWED:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: in {scope}: {text}")
    assert wrong == [], "ask bevquant_graph.layer_class, which knows code of a subclass's own"
    own = {key for key in ALLOWED if key.split(".")[0] in packages}
    assert own <= found, "these ask no longer"


PLANTED = [
    "isinstance(m, nn.Conv2d)",
    "isinstance(m, (nn.Linear, str))",
    "isinstance(m, nn.ReLU | nn.ReLU6)",
    "isinstance(m, TABLE_OF_PAIRS)",
    "isinstance(m, (*LAYERS, str))",
    "issubclass(type(m), torch.nn.modules.batchnorm._BatchNorm)",
    "type(m) is nn.Identity",
    "type(m) != nn.Identity",
    "m.__class__ == nn.Identity",
    "type(m) in TABLE",
    "type(m) not in LAYERS",
    "TABLE[type(m)]",
    "TABLE.get(type(m), 3)",
    "type(m).__name__ == 'BatchNorm2d'",
    "type(m).__name__ in ('ReLU', 'Own')",
    "singledispatched.register(nn.GELU)",
]


@pytest.mark.parametrize("planted", PLANTED)
def test_each_form_of_the_question_is_found(planted: str) -> None:
    names = {"nn": nn, "torch": torch, "TABLE": {nn.ReLU: 1}, "LAYERS": (nn.Linear, nn.ReLU),
             "TABLE_OF_PAIRS": (nn.Conv1d, nn.Conv2d)}  # fmt: skip
    assert findings(f"class C:\n def f(self, m):\n  return {planted}", names) == [
        ("C.f", 3, planted)
    ]


def test_classes_in_variables_and_in_patterns_are_found() -> None:
    names = {"nn": nn, "TABLE": {nn.ReLU: 1}}
    assert findings("def f(m):\n cls = type(m)\n return TABLE[cls]", names)
    assert findings("def f(m):\n match m:\n  case nn.ReLU():\n   return 1", names)


def test_what_is_no_question_for_a_layer_is_passed() -> None:
    names = {"nn": nn, "torch": torch, "KINDS": {int: 1, nn.Module: 2}}
    for text in ("isinstance(m, nn.Module)", "isinstance(m, nn.Sequential | nn.ModuleList)",
                 "type(m) in KINDS", "isinstance(m, torch.Tensor)", "layer_class(m, nn.ReLU)",
                 "type(m).__name__ == 'Tensor'"):  # fmt: skip
        assert findings(f"def f(m):\n return {text}", names) == [], text
