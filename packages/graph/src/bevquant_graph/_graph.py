"""A captured model: operations with module, source line and consumers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ._batch_arguments import as_example
from ._calls import Followed
from ._conditions import Condition, bound_guards
from ._constants import Place as OwnPlace
from ._constants import own_tensors
from ._faults import (
    CaptureError,
    author_line,
    author_lines,
    described,
    first_fault,
    lower_precision,
)
from ._frames import frames_of
from ._memory import changed_attributes
from ._normal import CALLED
from ._opaque import OPAQUE, Opaque, fixed_sizes, opaque_call, refuse_other_sizes
from ._operators import op_spec
from ._own_inputs import own_inputs
from ._quiet import evaluation
from ._read_members import ReadMembers
from ._signature import (
    Arguments,
    Constant,
    Leaf,
    Nested,
    Tree,
    arguments,
    entries,
    flatten,
    leaf_names,
    matched,
    place_name,
    rebuild,
)
from ._size_guards import Guard, check_guards
from ._state import state_kept
from ._switches import branch_of, size_questions
from ._tidy import ANSWER, CHECK, KEPT, NUMBERS, REQUIRE, SHELL, TENSOR_FORMS, fixed_number, inside


class OneRow(ValueError):
    """A squeeze would remove an axis of chosen rows, which the graph keeps."""


class Graph:
    """The operations of a model, functional: no operation changes another's result.

    Nodes are `torch.fx` nodes over ATen operators and bevquant's (`bevquant_sparse::…`,
    `bevquant_quantizers::fake_quantize`, `bevquant_graph::opaque`). Made by `capture`.

    Attributes:
        model: The model; paths of nodes and constants are paths in it.
        program: The exported program that holds `graph`.
        inputs: Structure of a call's arguments over `placeholders`.
        result: Structure of a call's result over `outputs`.
        opaque: Path of each module that is one node, with the reason.
        conditions: Conditions that torch specialised the graph on, in symbols of sizes; see
            `guards`.
        placeholders: Nodes of the inputs, in the order of their leaves.
        outputs: Returned nodes (or numbers), in the order of their leaves.
        members: Members of dictionaries and dataclasses that a call needs.
        writes: Buffers (by path) and inputs (by name) that the forward writes.
        decided: Whether numbers taken from tensors decide a branch or the length of a loop. The
            graph then holds for the example's numbers, as its requirements state.
    """

    def __init__(
        self,
        model: nn.Module,
        program: ExportedProgram,
        inputs: Tree,
        result: Tree,
        opaque: Mapping[str, Opaque],
        conditions: tuple[Condition, ...] = (),
        taken: Mapping[OwnPlace, Tensor] | None = None,
        *,
        decided: bool = False,
        members: ReadMembers | None = None,
    ) -> None:
        self.model, self.program = model, program
        self.inputs, self.result, self.opaque = inputs, result, dict(opaque)
        self.conditions, self.members = conditions, members or ReadMembers()
        self._taken, self.decided = dict(taken or {}), decided
        self._constants: dict[fx.Node, str] = {}
        self.placeholders: list[fx.Node] = []
        # An exported program takes parameters, buffers and constants as placeholders too.
        nodes = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                self.placeholders.append(node)
            else:
                self._constants[node] = str(spec.target)
        specs = program.graph_signature.output_specs
        made = self.graph.output_node().args[0]
        self.outputs: list[Any] = [
            value
            for value, spec in zip(made, specs, strict=True)  # type: ignore[arg-type]
            if spec.kind is OutputKind.USER_OUTPUT
        ]
        names = dict(zip((n.name for n in self.placeholders), self.input_names, strict=True))
        self.writes = tuple(
            inside(str(spec.target))
            if spec.kind is OutputKind.BUFFER_MUTATION
            else names.get(str(spec.target), str(spec.target))
            for spec in specs
            if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
        )

    @property
    def graph(self) -> fx.Graph:
        """The nodes, in order of execution."""
        graph: fx.Graph = self.program.graph_module.graph
        return graph

    @property
    def operations(self) -> Iterator[fx.Node]:
        """Nodes that compute a value, in order."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    @cached_property
    def input_names(self) -> list[str]:
        """A name for each leaf of the arguments: parameter of the forward, and key."""
        return leaf_names(self.model, self.inputs)

    @cached_property
    def constant_members(self) -> dict[str, Any]:
        """Members of the arguments that are constants of the graph: name to value."""
        found = ((place, e) for place, e in entries(self.inputs) if isinstance(e, Constant))
        return {place_name(self.model, place): entry.value for place, entry in found}

    @cached_property
    def fixed(self) -> dict[str, dict[int, int]]:
        """Sizes of the inputs that the forward fixes: name to axis to size."""
        found: dict[str, dict[int, int]] = {}
        for name, node in zip(self.input_names, self.placeholders, strict=True):
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                sizes = [(i, fixed_number(size)) for i, size in enumerate(value.shape)]
                found[name] = {i: size for i, size in sizes if size is not None}
        return found

    @cached_property
    def guards(self) -> tuple[Guard, ...]:
        """Conditions on the sizes of the inputs under which the graph is the model.

        Of every size that the forward fixes, and of every question that it asks about sizes.
        """
        return bound_guards(self.conditions, self.input_names, self.placeholders)

    # Where a node comes from

    def stack(self, node: fx.Node) -> tuple[str, ...]:
        """Paths of the modules whose forwards were running, the model ("") first."""
        entries = node.meta.get("nn_module_stack") or {}
        paths = [inside(path) for path, _ in entries.values() if path.split(".")[0] == SHELL]
        return tuple(paths) or ("",)

    @cached_property
    def called(self) -> frozenset[str]:
        """Paths of all modules whose forwards compute something; the model itself is "".

        Of a module that is one node, all that run inside of it.
        """
        inside = (path for entry in self.opaque.values() for path in entry.called)
        return frozenset(path for node in self.operations for path in self.stack(node)).union(
            inside
        )

    def path(self, node: fx.Node) -> str:
        """Path of the module whose forward computes the node."""
        return self.stack(node)[-1]

    def call(self, node: fx.Node, path: str | None = None) -> tuple[str, int]:
        """Path of that module, and the index of its call, from 0.

        Args:
            node: The node.
            path: One of `stack`, the innermost by default.
        """
        path = self.path(node) if path is None else path
        entries = (node.meta.get("nn_module_stack") or {}).items()
        keys = [key for key, (own, _) in entries if SHELL in key and inside(own) == path]
        # torch ends the key of a module's second and later calls in @1, @2, …
        count = re.search(r"@(\d+)$", keys[-1]) if keys else None
        return path, int(count.group(1)) if count else 0

    def module(self, node: fx.Node) -> nn.Module:
        """The module whose forward computes the node."""
        return self.model.get_submodule(self.path(node))

    def location(self, node: fx.Node) -> str:
        """``file:line`` of the author's code that computes the node; "" where unknown."""
        return author_line(node)

    @property
    def answers(self) -> frozenset[str]:
        """Names of the requirements that a question of the forward has the example's answer.

        Others are torch's own checks, such as that a slice ends inside its tensor.
        """
        required = (node for node in self.operations if node.target is REQUIRE)
        return frozenset(node.name for node in required if ANSWER in node.meta)

    def apart(self, nodes: Iterable[fx.Node]) -> str:
        """``file:line`` of a question whose answer decides which of the nodes run.

        Questions are about values (`answers`), and about sizes in the functions of the nodes. ""
        where all run for each frame, or all in the same branch.
        """
        called = [(self.path(node).rpartition(".")[2], author_lines(node)) for node in nodes]
        lines = [own for _, own in called]
        if len({tuple(own) for own in lines}) < 2:
            return ""
        answered = (n.meta.get(ANSWER, "") for n in (self.operations if self.decided else ()))
        asked = [place.partition(" ")[0].rpartition(":")[::2] for place in answered if place]
        functions = {place for own in lines for place in own}
        asked += [(file, str(n)) for file, line in functions for n in size_questions(file, line)]
        for file, line in dict.fromkeys(asked):
            of_line = partial(branch_of, file, int(line))
            branches = {
                next((b for f, n in own if f == file and (b := of_line(n, name))), "")
                for name, own in called
            }
            if len(branches) > 1:
                return f"{file}:{line}"
        return ""

    def required(self, requirement: fx.Node) -> str:
        """The tensor of a requirement's number, or of its number of rows, and its consumer."""
        pending = list(requirement.all_input_nodes)
        # The list grows in the loop: breadth first, up to the closest number.
        for node in pending:
            if str(node.target) in (*NUMBERS, "aten.sym_size.int"):
                pending = [node.all_input_nodes[0]]
                break
            pending += [n for n in node.all_input_nodes if n not in pending]
        taken = pending[0]
        while str(taken.target).startswith("aten.to."):
            taken = taken.all_input_nodes[0]
        place = requirement.meta.get(ANSWER) or requirement.meta.get(CHECK)
        return self.describe(taken) + (f", asked about in {place}" if place else "")

    def describe(self, node: fx.Node) -> str:
        """A node in words: operator, module, file and line."""
        target = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
        name = node.meta.get(CALLED, target)
        place = self.location(node)
        return f"{name} in {self.path(node) or 'the model'}" + (f" ({place})" if place else "")

    # Values

    def constant_path(self, node: object) -> str | None:
        """Path of the parameter or buffer, or name of the constant; None for other values."""
        name = self._constants.get(node)  # type: ignore[arg-type,call-overload,unused-ignore]
        return None if name is None else inside(str(name))

    def constant(self, node: object) -> Tensor | None:
        """The parameter, buffer or constant tensor itself; None for other values."""
        if node not in self._constants:
            return None
        name = self._constants[node]  # type: ignore[index,unused-ignore]
        # torch.export keeps non-persistent buffers among the constants, not in the state dict.
        found: Any = self.program.state_dict.get(name, self.program.constants.get(name))
        value: Tensor = found
        return value

    def opaque_of(self, node: fx.Node) -> tuple[Opaque, Any]:
        """The module of an opaque node: its entry, and the call with trees of inputs and result."""
        call = opaque_call(str(node.args[1]))
        return self.opaque[call.key.rpartition(":")[0]], call

    def of_copy(self, model: nn.Module) -> Graph:
        """The same operations over the tensors of a copy of the model.

        Raises:
            AttributeError: `model` does not have all of the tensors.
        """
        program = bound(self.program, model)
        return Graph(
            model, program, self.inputs, self.result, self.opaque, self.conditions, self._taken,
            decided=self.decided, members=self.members,
        )  # fmt: skip

    # Running

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on other inputs with the example's structure.

        Only the members of dictionaries and dataclasses that the forward reads are required. The
        arguments are not changed: a container that the forward writes to is returned as a new one,
        with the caller's other members.

        Raises:
            TypeError: The arguments have another structure than the example inputs.
            ValueError: Sizes for which the forward takes another branch; the message has condition,
                file and line.
        """
        given = args, kwargs
        return self.members.handed_on(rebuild(self.result, self._run(self._checked(given))), given)

    def check(self, example_inputs: Any) -> None:
        """Require that the graph returns the model's bits.

        Raises:
            CaptureError: It does not, as the message says with the first module that differs, or
                results depend on random numbers.
        """
        drawn = self._drawn()
        if drawn is not None:
            raise CaptureError(
                f"{self.describe(drawn)} draws random numbers that results depend on, so each call "
                "gives other ones; switch it off in evaluation mode (by an attribute of the "
                "module, for example), or make the numbers an input"
            )
        given = arguments(self.inputs_of(example_inputs))
        leaves = self._checked(given)
        # The replay below reads the model's buffers, so what the forward writes is restored first.
        with evaluation(self.model), torch.no_grad():
            with state_kept(self.model) as noted:
                arrays = {p for p, e in entries(self.result) if isinstance(e, Leaf) and e.kind}
                returned = self.members.made(self._called(given))
                wanted, _ = flatten(returned, arrays=lambda _, place: place in arrays)
            # A counter that no result depends on changes too, and is no error.
            if any(noted) and self._remembers(given):
                names = ", ".join(changed_attributes(self.model, [given]))
                raise CaptureError(
                    f"{described('', self.model)} keeps {names} from call to call, so a second "
                    "call on the same inputs gives other results. Capture "
                    "bevquant_graph.with_memory(model, frames), which makes such values inputs and "
                    "results"
                )
            try:
                made = self._run(own_inputs(leaves))
            except RuntimeError as error:
                problem = lower_precision(lambda: self._called(given))
                if not problem:
                    raise
                raise CaptureError(
                    f"the graph of {type(self.model).__name__} does not run: {problem}"
                ) from error
        values = [v for v in made if isinstance(v, Tensor)]
        tensors = [v for v in wanted if isinstance(v, Tensor)]
        if len(values) != len(tensors):
            raise CaptureError(
                f"the graph of {type(self.model).__name__} returns {len(values)} tensors, "
                f"the model {len(tensors)}"
            )
        for index, (one, other) in enumerate(zip(tensors, values, strict=True)):
            if not _same_bits(one, other):
                raise CaptureError(
                    f"output {index} of the graph of {type(self.model).__name__} differs from the "
                    f"model's: {self._fault(given)}"
                )

    def _drawn(self) -> fx.Node | None:
        """The first random numbers that results or requirements depend on.

        Two runs need not tell: a permutation of two is the example's in every second run.
        """
        for drawn in self.operations:
            if not op_spec(drawn.target).draws:
                continue
            pending, met = [drawn], set[fx.Node]()
            while pending:
                node = pending.pop()
                if node.op == "output" or node.target is REQUIRE:
                    return drawn
                new = node.users.keys() - met
                met |= new
                pending += new
        return None

    def _called(self, given: Arguments) -> Any:
        """The model's result; a recorder may be active."""
        args, kwargs = own_inputs(given)
        return self.model(*args, **kwargs)

    def _remembers(self, given: Arguments) -> bool:
        """Whether a call gives other values after a call on other inputs."""

        def result(*calls: Arguments) -> list[Any]:
            with state_kept(self.model):
                return [flatten(self._called(call))[0] for call in calls][-1]

        tensors, tree = flatten(given)
        halved = rebuild(tree, [t / 2 if t.is_floating_point() else t for t in tensors])
        first = result(given)
        try:
            second = result(halved, given)  # equal frames hide a mean over frames
        except Exception:  # of the model's code, which may refuse such values
            second = result(given, given)
        return not all(map(_same_bits, filter(_is_tensor, first), filter(_is_tensor, second)))

    def _fault(self, given: Arguments) -> str:
        """Probable cause of a difference between graph and model."""

        def run() -> None:
            with evaluation(self.model), torch.no_grad():
                self._called(given)

        numbers = (node for node in self.operations if str(node.target) in NUMBERS)
        taken = next(map(self.describe, numbers), "")
        counts = f"; it takes a number out of a tensor: {taken}" if taken else ""
        with state_kept(self.model):
            fault = first_fault(self.model, run) or lower_precision(run)
        return fault or (
            f"{self._departure(given) or 'no module departs alone'}; its forward decides by "
            f"something that is no input, such as a counter or a random number{counts}"
        )

    def leaves(self, inputs: Any) -> list[Any]:
        """Values of `placeholders` for a call: a tuple, a dict of named inputs, or one input.

        Raises:
            TypeError: Inputs of another structure than the example's.
            ValueError: Sizes for which the forward takes another branch.
        """
        return self._checked(arguments(self.inputs_of(inputs)))

    def inputs_of(self, batch: Any) -> Any:
        """A loader's batch as a tuple of positional or a dict of named inputs (`as_example`).

        Inputs with the example's structure are returned unchanged. A list is one input where the
        example's first input is a list.
        """
        if frames_of(self.model, batch) is not None:
            return as_example(self.model, batch)
        tree: Any = self.inputs
        args, kwargs = tree.members
        if isinstance(batch, dict) and batch.keys() <= set(kwargs.keys or ()):
            return batch
        if isinstance(batch, list):
            if any(isinstance(m, Nested) and m.kind is list for m in args.members[:1]):
                return (batch,)
            batch = tuple(batch)
        if isinstance(batch, tuple) and len(batch) == len(args.members):
            return tuple(batch)
        return as_example(self.model, batch)

    def _checked(self, given: Arguments) -> list[Any]:
        # Integers are leaves where the capture made them inputs: their placeholders hold no tensor.
        numbers = any(not isinstance(n.meta.get("val"), Tensor) for n in self.placeholders)
        leaves, tree = flatten(self.members.required(given), numbers=numbers)
        leaves = list(matched(self.inputs, tree, leaves, "inputs"))
        sizes = {
            name: leaf.shape if isinstance(leaf, Tensor) else leaf
            for name, leaf in zip(self.input_names, leaves, strict=True)
        }
        check_guards(self.guards, sizes, "capture again with such inputs")
        return leaves

    def _check_taken(self) -> None:
        """Refuse a model whose forward would take other numbers out of its own tensors by now."""
        owners = {path: self.model.get_submodule(path) for path, _ in self._taken}
        own = {path: own_tensors(module) for path, module in owners.items()}
        for (path, name), value in self._taken.items():
            now = own[path].get(name)
            if now is None or not torch.equal(now, value):
                named = f"{path}.{name}" if path and " " not in name else name
                raise ValueError(
                    f"{type(self.model).__name__}: its forward counts with numbers that it takes "
                    f"out of tensors, and {named} holds others than when it was captured; capture "
                    "again"
                )

    def _run(self, leaves: list[Any], watch: Any = None) -> list[Any]:
        self._check_taken()
        given = dict(zip(self.placeholders, leaves, strict=True))
        values = [
            given[node] if node in given else self.constant(node)
            for node in self.graph.nodes
            if node.op == "placeholder"
        ]

        def begin(node: fx.Node) -> None:
            if node.target is REQUIRE and not runner.fetch_args_kwargs_from_env(node)[0][0]:
                self.refuse(node)

        def see(node: fx.Node, given: Any, made: Any) -> None:
            if node.target is OPAQUE:
                refuse_other_sizes(str(node.args[1]).rpartition(":")[0], fixed_sizes(node), made)
            if watch is not None and isinstance(made, Tensor):
                watch(made)

        runner = Followed(self.program.graph_module, see, begin=begin)
        with torch.no_grad():
            made = runner.run(*values)
        # New values of written inputs and buffers come before the results (`_functional`).
        return list(made[len(made) - len(self.outputs) :])

    def refuse(self, requirement: fx.Node) -> None:
        """Refuse a frame that breaks a requirement.

        Raises:
            ValueError: Always.
        """
        if requirement.args[1] == KEPT:
            raise OneRow(
                f"{type(self.model).__name__}: expected other than 1 row, got 1 "
                f"({self.required(requirement)}): squeeze then removes this axis too. Name the "
                "axes that it is to remove, as in squeeze(1)"
            )
        raise ValueError(
            f"{type(self.model).__name__}: its forward decides by a number that it takes out of a "
            f"tensor, or by its number of rows ({self.required(requirement)}), and the example's "
            "decision is another one; capture again with inputs like these, or keep it a tensor "
            f"({TENSOR_FORMS})"
        )

    def _departure(self, given: Arguments) -> str:
        """The first module of the model whose output the graph never makes."""
        seen: set[tuple[Any, ...]] = set()

        # A fingerprint, so that the tensors of a whole run need not be kept.
        def print_of(value: Tensor) -> tuple[Any, ...]:
            flat = value.detach().double().flatten()
            return tuple(value.shape), float(flat.sum()), float(flat.abs().sum())

        self._run(own_inputs(self._checked(given)), lambda v: seen.add(print_of(v)))
        missing: list[str] = []

        def look(path: str, _: Any, __: Any, out: Any) -> None:
            if isinstance(out, Tensor) and print_of(out) not in seen:
                missing.append(path)

        with ExitStack() as hooks:
            for path, module in self.model.named_modules():
                if next(module.children(), None) is None:
                    hooks.callback(module.register_forward_hook(partial(look, path)).remove)
            with torch.no_grad(), state_kept(self.model):
                self._called(given)
        return f"{missing[0]} departs first" if missing else ""

    def __repr__(self) -> str:
        count = sum(1 for _ in self.operations)
        opaque = f", {len(self.opaque)} modules not followed" if self.opaque else ""
        return f"Graph of {type(self.model).__name__}: {count} operations{opaque}"


def bound(program: Any, model: nn.Module) -> ExportedProgram:
    """A program over the parameters and buffers that a model has under the program's names."""

    def tensor(name: str) -> Any:
        owner, _, last = inside(name).rpartition(".")
        return getattr(model.get_submodule(owner), last)

    # A shallow copy, as other models are bound to the same program (`_recall`).
    made = copy.copy(program)
    buffers = program.graph_signature.buffers  # some of which are among its constants
    made._state_dict = {name: tensor(name) for name in program._state_dict}
    made._constants = {
        name: tensor(name) if name in buffers else value
        for name, value in program._constants.items()
    }
    return made  # type: ignore[no-any-return]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # NaN in the same position counts as equal.
    same = (
        (one == other) | (one.isnan() & other.isnan()) if one.is_floating_point() else one == other
    )
    return bool(same.all())
