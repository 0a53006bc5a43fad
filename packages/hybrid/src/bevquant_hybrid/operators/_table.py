"""The support table: rows, marches and rendering."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal

from bevquant_hybrid.operators._expressions import DTYPES, QUANTITIES, Expression, OperatorCall

# Attributes that a limit may name without the row declaring them: `data = true` limits are
# checked where the attribute is known and reported as advice where it is not.
_DATA = ("input_amax", "weight_dtype")

_ENTRY_KEYS = {"rows", "aliases", "eager", "needs", "any_rank", "advice", "on_cpu", "identity"}
_SUPPORT_KEYS = {"input", "second_input", "output", "limits", "like"}
_LIMIT_KEYS = {"require", "when", "remedy", "data", "source", "except"}


@dataclass(frozen=True)
class Limit:
    """A condition that a call must meet."""

    require: Expression  # comparison that must hold for every number
    # Comparison that activates the limit if any number meets it; None: always
    when: Expression | None
    remedy: str  # advice for the user
    # The limit concerns values or dtypes of weights. Without that attribute it is only advice
    needs_data: bool = False
    older: bool = False  # from older documents, which the table's documents do not contradict
    unless_any_rank: bool = False  # a limit of the march that rows with `any_rank` are exempt from

    @property
    def text(self) -> str:
        """The condition in words of the table."""
        return self.require.text + (f" when {self.when.text}" if self.when else "")


@dataclass(frozen=True)
class Support:
    """One march's support of an operator."""

    input: tuple[str, ...]  # dtypes of its inputs; empty: any
    # Dtypes of the inputs after the first; None: as input; empty: any
    second_input: tuple[str, ...] | None
    output: tuple[str, ...] | Literal["same"]  # dtypes of the output, or "same" as the first input
    limits: tuple[Limit, ...]  # further conditions

    def accepted(self, index: int) -> tuple[str, ...]:
        """Dtypes of the input at a place; empty: any."""
        return self.second_input if index and self.second_input is not None else self.input

    def takes(self, index: int, dtype: str) -> bool:
        """Whether the input at a place may have a dtype."""
        return not self.accepted(index) or dtype in (*self.accepted(index), "constant")


@dataclass(frozen=True)
class Operator:
    """A row of the table."""

    name: str  # the documents' name, e.g. torch.nn.AvgPool2d
    family: str  # the file that holds it
    aliases: tuple[str, ...]  # other spellings of the same computation
    eager: str  # its replacement in eager mode, or ""
    needs: tuple[str, ...]  # required attributes of a call
    any_rank: bool  # exempt from a march's limit on the number of dimensions
    advice: tuple[str, ...]  # remarks on precision and use that cannot be checked
    support: Mapping[str, Support]  # by column; a missing column is not supported
    on_cpu: bool = False  # documented to run on the CPU, on floats
    identity: bool = False  # its result is its input, in evaluation


@dataclass(frozen=True)
class March:
    """A BPU architecture: its column of the table and the limits of all its operators."""

    name: str  # name in `set_march`
    title: str  # name in the documents
    chips: str  # chips with this architecture
    column: str  # of the table
    limits: tuple[Limit, ...]  # of every operator
    placement: str  # column of the mapper's placement list
    # Whether the column has only a part of the public table: support of the other operators
    # is unknown
    partial: bool = False
    hb_mapper: bool = False  # whether hb_mapper compiles for it


@dataclass(frozen=True)
class SupportTable:
    """All rows and marches.

    >>> table = load_support_table()
    >>> table.find("torch.Tensor.exp").eager
    'horizon.nn.Exp'
    >>> table.march("BAYES_E").column
    'bayes'
    """

    operators: Mapping[str, Operator]
    marches: Mapping[str, March]
    _spellings: Mapping[str, str]

    def find(self, name: str) -> Operator | None:
        """The row of a name, an alias, or the equivalent function or tensor method."""
        for spelling in (name, *_twins(name)):
            if spelling in self._spellings:
                return self.operators[self._spellings[spelling]]
        return None

    @cached_property
    def replaced_by(self) -> Mapping[str, Sequence[str]]:
        """The rows that an eager module replaces, by its name."""
        found: dict[str, list[str]] = {}
        for row in self.operators.values():
            found.setdefault(row.eager, []).append(row.name)
        return found

    def march(self, name: str) -> March:
        """The march called ``name``, such as ``bayes-e``, in any case."""
        key = name.lower().replace("_", "-")
        if key not in self.marches:
            raise ValueError(f"march {name!r}; expected one of {', '.join(self.marches)}")
        return self.marches[key]


def _twins(name: str) -> tuple[str, ...]:
    if name.startswith("torch.Tensor."):
        return ("torch." + name.removeprefix("torch.Tensor."),)
    if name.startswith("torch.") and name.count(".") == 1:
        return ("torch.Tensor." + name.removeprefix("torch."),)
    return ()


@cache
def load_support_table() -> SupportTable:
    """Read and check the data files that come with the package."""
    folder = resources.files(__package__) / "tables"
    files = {
        entry.name.removesuffix(".toml"): tomllib.loads(entry.read_text(encoding="utf-8"))
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }
    marches = {name: _march(name, data) for name, data in files.pop("marches").items()}
    return build_table(files, marches)


def build_table(files: Mapping[str, Mapping[str, Any]], marches: dict[str, March]) -> SupportTable:
    """Check the parsed files, each a family of operators, and join them into one table."""
    columns = {march.column for march in marches.values()}
    entries: dict[str, tuple[str, Mapping[str, Any]]] = {}
    spellings: dict[str, str] = {}
    for family, data in files.items():
        for entry in data["operator"]:
            _only_keys(f"{family}.toml", entry, _ENTRY_KEYS | columns)
            for row in entry["rows"]:
                _once(spellings, row, row)
                entries[row] = (family, entry)
            for alias in entry.get("aliases", ()):
                _once(spellings, alias, entry["rows"][0])
    operators = {
        row: Operator(
            name=row,
            family=family,
            aliases=tuple(entry.get("aliases", ())),
            eager=entry.get("eager", ""),
            needs=tuple(entry.get("needs", ())),
            any_rank=entry.get("any_rank", False),
            advice=tuple(entry.get("advice", ())),
            support={
                column: _support(row, column, entry[column], entries, tuple(entry.get("needs", ())))
                for column in columns
                if column in entry
            },
            on_cpu=entry.get("on_cpu", False),
            identity=entry.get("identity", False),
        )
        for row, (family, entry) in entries.items()
    }
    return SupportTable(operators, marches, spellings)


def _march(name: str, data: Mapping[str, Any]) -> March:
    limits = tuple(_limit(name, limit, ()) for limit in data["limits"])
    column = data["column"]
    return March(
        name, data["title"], data["chips"], column, limits, data.get("placement", column),
        partial=data.get("partial", False), hb_mapper=data.get("hb_mapper", False),
    )  # fmt: skip


def _support(
    row: str,
    column: str,
    data: Mapping[str, Any],
    entries: Mapping[str, tuple[str, Mapping[str, Any]]],
    needs: tuple[str, ...],
) -> Support:
    _only_keys(f"{row} on {column}", data, _SUPPORT_KEYS)
    if "like" in data:
        model = entries.get(data["like"], ("", {}))[1].get(column)
        if model is None or "like" in model:
            raise ValueError(f"{row} on {column}: like {data['like']!r}, which describes nothing")
        data = {**model, **{key: value for key, value in data.items() if key != "like"}}
    second = data.get("second_input")
    return Support(
        input=_dtypes(row, data["input"]),
        second_input=None if second is None else _dtypes(row, second),
        output="same" if data["output"] == "same" else _dtypes(row, data["output"]),
        limits=tuple(_limit(row, limit, needs) for limit in data.get("limits", ())),
    )


def _limit(owner: str, data: Mapping[str, Any], needs: tuple[str, ...]) -> Limit:
    _only_keys(f"{owner}: limit {data.get('require')!r}", data, _LIMIT_KEYS)
    require = Expression.parse(data["require"])
    when = Expression.parse(data["when"]) if "when" in data else None
    for name in require.names + (when.names if when else ()):
        if name not in QUANTITIES and name not in needs and name not in _DATA:
            raise ValueError(f"{owner}: limit {require.text!r} names {name!r}, unknown there")
    return Limit(
        require,
        when,
        data["remedy"],
        needs_data=data.get("data", False),
        older=data.get("source") == "older",
        unless_any_rank=data.get("except") == "any_rank",
    )


def _dtypes(row: str, value: object) -> tuple[str, ...]:
    if value == "any":
        return ()
    if not isinstance(value, list) or not value or not set(value) <= set(DTYPES):
        raise ValueError(f"{row}: dtypes {value!r}; expected 'any' or a list out of {DTYPES}")
    return tuple(value)


def _only_keys(where: str, data: Mapping[str, Any], allowed: set[str]) -> None:
    unknown = sorted(set(data) - allowed)
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; expected {sorted(allowed)}")


def _once(spellings: dict[str, str], spelling: str, row: str) -> None:
    if spelling in spellings:
        raise ValueError(f"{spelling!r} is listed twice: {spellings[spelling]!r} and {row!r}")
    spellings[spelling] = row


def find_row(name: str) -> Operator | None:
    """The row of a name; see `SupportTable.find`."""
    return load_support_table().find(name)


def is_float(call: OperatorCall) -> bool:
    """Whether a call computes on floats (some inputs, such as boxes, may be floats anyway)."""
    if call.operator.endswith("Stub") or "float32" not in call.input_dtypes:
        return False
    row = find_row(call.operator)
    columns = row.support.values() if row else ()
    if call.input_dtypes[0] == "float32":  # views take any dtype, wherever their input is
        return not any("float32" in column.input for column in columns)
    return any(
        dtype == "float32" and not any(column.takes(index, dtype) for column in columns)
        for index, dtype in enumerate(call.input_dtypes)
    )


def runs_on_cpu(call: OperatorCall) -> bool:
    """Whether a call computes on floats, or is documented to run on the CPU."""
    row = find_row(call.operator)
    return is_float(call) or (row is not None and row.on_cpu)


def is_identity(operator: str) -> bool:
    """Whether an operator's result is its input, as in evaluation that of Dropout."""
    row = find_row(operator)
    return row is not None and row.identity


def render_support_table(march: str | None = None, *, markdown: bool = False) -> str:
    """The support table as text.

    Args:
        march: Only its column; None: both columns.
        markdown: A Markdown table with every limit spelled out; else one line per operator and
            one below it for each limit.

    Example:
        >>> print(render_support_table("bernoulli2").splitlines()[0])
        Operators on BERNOULLI2 (Journey 3, RDK X3)
    """
    table = load_support_table()
    marches = list(table.marches.values()) if march is None else [table.march(march)]
    columns = list(dict.fromkeys(m.column for m in marches))
    titles = {
        column: " and ".join(m.title for m in marches if m.column == column) for column in columns
    }
    if markdown:
        return _markdown(table, columns, titles)
    lines = []
    for column in columns:
        chips = ", ".join(m.chips for m in marches if m.column == column)
        lines += [f"Operators on {titles[column]} ({chips})", ""]
        general = next(m.limits for m in marches if m.column == column)
        lines += ["every operator", *(f"    {limit.text}" for limit in general), ""] * bool(general)
        lines += _plain(table, column)
    return "\n".join(lines).rstrip() + "\n"


def _plain(table: SupportTable, column: str) -> list[str]:
    lines: list[str] = []
    unsupported: list[str] = []
    for row in table.operators.values():
        support = row.support.get(column)
        if support is None:
            unsupported.append(row.name)
            continue
        lines.append(f"{row.name:<50} {_flow(support)}")
        lines += [f"    {limit.text}" for limit in support.limits]
        lines += [f"    note: {text}" for text in row.advice]
    return [*lines, "", "not supported", *(f"    {name}" for name in unsupported), ""]


def _markdown(table: SupportTable, columns: list[str], titles: dict[str, str]) -> str:
    head = ["operator", "eager mode", *(titles[c] for c in columns), "remarks"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for row in table.operators.values():
        cells = [f"`{row.name}`", f"`{row.eager}`" if row.eager else ""]
        cells += [_cell(row, column) for column in columns]
        lines.append(f"| {' | '.join([*cells, '<br>'.join(row.advice)])} |")
    return "\n".join(lines) + "\n"


def _cell(row: Operator, column: str) -> str:
    support = row.support.get(column)
    if support is None:
        return "no"
    limits = (f"`{limit.text}`" for limit in support.limits)
    return "<br>".join([_flow(support), *limits])


def _flow(support: Support) -> str:
    inputs = " ".join(support.input) or "any"
    if support.second_input is not None:
        inputs += f", then {' '.join(support.second_input) or 'any'}"
    return f"{inputs} → {support.output if support.output == 'same' else ' '.join(support.output)}"


# Placement of a hybrid model's operators: the mapper's list.

_PLACES = ("BPU", "CPU")


@dataclass(frozen=True)
class Listed:
    """An operator's placement and its reason."""

    place: str
    because: str


def place_operator(operator: str, march: str) -> Listed:
    """The mapper's placement of ``operator``, a row of the support table or an alias.

    Example:
        >>> [place_operator("torch.sub", march).place for march in ("bernoulli2", "bayes")]
        ['CPU', 'BPU']
    """
    column = load_support_table().march(march).placement
    row = find_row(operator)
    group = _groups().get(row.name) if row else None
    if group is None:
        return Listed("CPU", "it is not among the operators that the mapper runs on a BPU")
    return Listed(group[0][column], group[1])


@cache
def _groups() -> Mapping[str, tuple[Mapping[str, str], str]]:
    text = (resources.files(__package__) / "placement.toml").read_text(encoding="utf-8")
    table = load_support_table()
    columns = {march.placement for march in table.marches.values()}
    groups: dict[str, tuple[Mapping[str, str], str]] = {}
    for group in tomllib.loads(text)["group"]:
        place = group["place"]
        if set(place) != columns or not set(place.values()) <= set(_PLACES):
            raise ValueError(
                f"placement {place}: expected BPU or CPU for each of {sorted(columns)}"
            )
        for row in group["rows"]:
            if row not in table.operators or row in groups:
                raise ValueError(f"placement of {row!r}: no row of the support table, or twice")
            groups[row] = (place, group["because"])
    return groups
