"""Rules of a linter, and their findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]

# What a rule holds for: every target, or every dense one (`Target.labels`).
ANY = ("any",)
DENSE = ("dense",)


@dataclass(frozen=True)
class Finding:
    """One place where a file breaks a rule.

    Attributes:
        id: The rule, such as ``SPC011``; ``bevquant-lint --rules`` explains it.
        severity: ``"error"``: the target refuses the file, computes other values or crashes;
            ``"warning"``: it is slower, less accurate or reads unnecessary data.
        node: Name of the node or tensor, or ``"file"``.
        reason: What was expected and what came.
        remedy: What to do.
    """

    id: str
    severity: Severity
    node: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.id} {self.severity} at {self.node}: {self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Rule:
    """A requirement of a target on a file.

    Attributes:
        id: Three letters for the origin, three digits.
        severity: See `Finding`.
        means: The requirement.
        remedy: What to do about a file that breaks it.
        targets: Names, families or kinds of the targets of the rule.
    """

    id: str
    severity: Severity
    means: str
    remedy: str
    targets: tuple[str, ...] = ANY

    def found(self, node: str, reason: str) -> Finding:
        """A finding of this rule."""
        return Finding(self.id, self.severity, quoted(node, plain=True), reason, self.remedy)


class Rules(list[Rule]):
    """Rules of one target in their order; a call adds one.

    Args:
        letters: Start of each id.
        target: Name of the target.
        severity: Of a rule that states none.
    """

    def __init__(self, letters: str, target: str, severity: Severity = "error") -> None:
        super().__init__()
        self._letters, self._target, self._severity = letters, target, severity

    def __call__(
        self, number: int, means: str, remedy: str, severity: Severity | None = None
    ) -> Rule:
        """Add a rule."""
        id_ = f"{self._letters}{number:03}"
        self.append(Rule(id_, severity or self._severity, means, remedy, (self._target,)))
        return self[-1]


def quoted(name: object, *, plain: bool = False) -> str:
    """A name out of a file, safe to print: control characters escaped, at most 80 characters.

    Example:
        >>> quoted("conv1")
        "'conv1'"
        >>> print(quoted("a" * 100, plain=True)[-5:])
        aaaa…
    """
    text = repr(str(name)[:81])
    text = text[1:-1] if plain else text
    return text if len(str(name)) <= 80 else text[:80] + "…"
