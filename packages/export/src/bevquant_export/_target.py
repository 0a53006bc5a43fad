"""A target: an engine that takes files, with all facts about it; and installed targets by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bevquant_graph import check_kind
from bevquant_quantizers import plugins

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import onnx

    from bevquant_export.lint._graph import Finding, Graph, Rule


@dataclass(frozen=True, eq=False)
class LintFile:
    """A file under inspection.

    Attributes:
        path: The file; external data and settings are beside it.
        model: Its protobuf, decoded and not checked.
        graphs: The main graph, then bodies of functions and subgraphs.
        cpu: CPU on which a file for CPUs will run: ``"vnni"`` or ``"any"``.
    """

    path: Path
    model: onnx.ModelProto
    graphs: Sequence[Graph]
    cpu: str = "any"


class Target(ABC):
    """An engine: the form of its files, and how they are written, linted, verified and built.

    `find_target` returns a target by name. Packages add targets through entry points of the group
    ``bevquant.targets``, one per name; programs add them at run time with `register_target`.

    Attributes:
        name: Name in commands, as in ``bevquant-lint --target``.
        title: Name on pages.
        aliases: Further names.
        kind: ``"dense"`` for files of standard operators, which get the rules of all dense targets
            (known operators, float32 constants, windows, Q/DQ pairs); ``"sparse"`` for an engine's
            own format.
        family: Rules that name this family apply to the target too, such as ``"tensorrt"``.
        domains: Operator domains that the engine supplies.
        rules: Findings of `lint` beyond the rules that all files share.
        sparse: Target of the sparse encoder of the same model; empty if this target takes it.
        quantized_outputs: Whether the engine multiplies in integers only where the result is
            quantized too. A model written as several files then ends each file with the quantizer
            that the next file begins with.
        unverified: Facts that nobody could verify on the engine, one sentence each. They are part
            of every manifest.
        command: The line of `commands`, with ``{path.name}`` or ``{path.stem}`` for the file.
    """

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    kind: str = "dense"
    family: str = ""
    domains: frozenset[str] = frozenset()
    rules: tuple[Rule, ...] = ()
    sparse: str = ""
    quantized_outputs: bool = False
    unverified: tuple[str, ...] = ()
    command: str = ""

    @abstractmethod
    def write(self, model: nn.Module, args: Any, path: Path, **options: Any) -> Any:
        """Write a calibrated model.

        Args:
            model: Calibrated, in evaluation mode. It is not changed.
            args: Example inputs.
            path: The file. It is written to a temporary name and renamed.
            options: Options of the target; an unknown one is a TypeError.

        Returns:
            The result: an object with at least ``path``.

        Raises:
            ValueError: An operation has no form in such files; the message names its module.
        """

    @abstractmethod
    def lint(self, file: LintFile) -> Iterator[Finding]:
        """Findings beyond the rules of every file: refused, misread or slow parts."""

    @abstractmethod
    def compare(self, made: Any, model: nn.Module, args: Any) -> Sequence[Any]:
        """Compare each tensor of a written file with the integers of its model.

        Args:
            made: Result of `write`.
            model: The model.
            args: Inputs with the structure of the example.

        Returns:
            Rows with ``path``, ``elements`` and ``different``.
        """

    def commands(self, path: Path, *, quantized: bool = True) -> tuple[str, ...]:
        """Command lines that build or run a file, to print.

        Args:
            path: The file, read for the number of its inputs and outputs where that matters.
            quantized: Whether it holds integers.
        """
        del quantized
        return (self.command.format(path=path),) if self.command else ()

    def fastest(self, cpu: str) -> dict[str, Any]:
        """Options of `write` for the fastest exact file on such CPUs.

        Args:
            cpu: ``"vnni"`` or ``"any"`` (`cpu_at_hand`); no effect for engines other than CPUs.
        """
        del cpu
        return {}

    @property
    def runner(self) -> str:
        """Runtime of its files on a CPU here: ``"onnxruntime"`` or ``"openvino"``, or ``"plain"``.

        The first two optimise, as in use; the last is ONNX Runtime node by node.
        """
        return "plain"

    @property
    def half(self) -> bool:
        """Whether unquantized parts are float16 in its files."""
        return False

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions of a plan (`bevquant_qnn.PrecisionPlan`) that its files of dense layers hold.

        Weights of 4 bits are int8 with larger steps.
        """
        return ("int8", "int4", "float")

    @property
    def unsigned(self) -> bool:
        """Whether its files of dense layers hold activations of 0…255 with the zero point 0."""
        return False

    @property
    def labels(self) -> frozenset[str]:
        """Labels by which a rule names the target: its names, its family, its kind, ``"any"``."""
        return frozenset({self.name, *self.aliases, self.family, self.kind, "any"}) - {""}

    def holds(self, rule: Rule) -> bool:
        """Whether a rule applies to this target."""
        return not self.labels.isdisjoint(rule.targets)


# Engines, and forms of a sparse encoder's file alone. Each entry point is a name of a target.
ENTRY_POINTS = ("bevquant.targets", "bevquant.dialects")

_added: dict[str, Target] = {}


def targets() -> tuple[Target, ...]:
    """All targets: this package's first, then those of other entry points, then those registered.

    Raises:
        ImportError: A package's entry point cannot be loaded; the entry point is named.
        ValueError: Two targets have one name, or an entry point has a name that its target lacks.
    """
    return (*_loaded(), *_added.values())


def target_names() -> tuple[str, ...]:
    """Names that `find_target` accepts: targets first, then aliases."""
    found = targets()
    return (*(t.name for t in found), *(alias for t in found for alias in t.aliases))


def find_target(name: str) -> Target:
    """Return the target with this name or alias.

    Raises:
        ValueError: There is none.

    Example:
        >>> find_target("tensorrt").name
        'tensorrt10'
    """
    for target in targets():
        if name == target.name or name in target.aliases:
            return target
    raise ValueError(
        f"target {name!r}: expected one of {', '.join(target_names())}; a package adds one as an "
        f"entry point of the group {ENTRY_POINTS[0]}, a program with register_target"
    )


def register_target(target: Target) -> None:
    """Add a target for the rest of this process. Entry points add one for every process.

    Raises:
        ValueError: One of its names is taken.
    """
    check_kind(target, Target, "a Target")
    _check((*targets(), target))
    _added[target.name] = target


@cache
def _loaded() -> tuple[Target, ...]:
    found: dict[int, Target] = {}
    for entry in plugins.installed(*reversed(ENTRY_POINTS), own="bevquant_export"):
        target = _load(entry)
        found[id(target)] = target
    _check(tuple(found.values()))
    return tuple(found.values())


def _load(entry: EntryPoint) -> Target:
    target: Target = plugins.load(entry, f"target {entry.name!r}")
    names = (target.name, *target.aliases)
    if entry.name not in names:
        raise ValueError(
            f"target {target.name!r}: its entry point {entry.value} is called {entry.name!r}, "
            f"which is no name of it; call it one of {', '.join(names)}"
        )
    return target


def _check(found: tuple[Target, ...]) -> None:
    names: dict[str, Target] = {}
    for target in found:
        for name in (target.name, *target.aliases):
            other = names.setdefault(name, target)
            if other is not target:
                raise ValueError(
                    f"target {name!r}: two targets have this name, {other.title} and "
                    f"{target.title}; give one of them another"
                )
