"""Decompositions of torch's functions into operators with a quantized form."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from bevquant_hybrid.nn import _functions as functions
from bevquant_hybrid.nn._functions import Div, FloatFunctional, LayerNorm, Normalize, Where

# The calls that replace a function: new modules, their methods, functions of tensors.


@dataclass(eq=False)
class Step:
    """One call: of a new module, of a method of one, of a function, or of a tensor's method."""

    operation: str  # part of the new module's name; "" where there is no module
    module: nn.Module | None  # the new module, or None
    target: Any  # of a module with methods, the method; else the function or the tensor's method
    args: tuple[Any, ...]  # nodes, numbers and earlier steps
    kwargs: dict[str, Any] = field(default_factory=dict)  # the same by name


class Recipe:
    """The steps that a function becomes."""

    hybrid: str  # in a hybrid model: always, never, or where its mapper runs all on the BPU
    result: Any  # the last step; a node where the function is the identity

    def __init__(self, numbers: set[Node], parameter: Callable[[Node], Any]) -> None:
        self.numbers = numbers  # nodes that hold numbers
        self.parameter = parameter  # looks up what a get_attr node reads
        self.steps: list[Step] = []

    def add(self, step: Step) -> Step:
        """Append a step."""
        self.steps.append(step)
        return step

    def arithmetic(self, method: str, *args: Any, **kwargs: Any) -> Step:
        """Call a method of a new FloatFunctional."""
        return self.add(Step(method, FloatFunctional(), method, args, kwargs))

    def module(self, operation: str, module: nn.Module, *args: Any) -> Step:
        """Call a new module."""
        return self.add(Step(operation, module, None, args))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Step:
        """Call a function, or a method of a tensor."""
        return self.add(Step("", None, target, args, kwargs))

    def is_tensor(self, value: Any) -> bool:
        """Whether an argument is a tensor of the graph."""
        return isinstance(value, Step | Node) and value not in self.numbers

    def is_number(self, value: Any) -> bool:
        """Whether an argument is a number, known now or as traced."""
        return isinstance(value, int | float) or (isinstance(value, Node) and value in self.numbers)

    def scaled(self, x: Any, factor: Any) -> Any:
        """X times a number."""
        return x if factor in (1, 1.0) else self.arithmetic("mul_scalar", x, factor)

    def inverse(self, number: Any) -> Any:
        """1 / a number; None where that is 0."""
        if isinstance(number, Node):
            return self.call(operator.truediv, 1.0, number)
        return 1 / number if number else None

    def negated(self, number: Any) -> Any:
        """The negative of a number."""
        return self.call(operator.neg, number) if isinstance(number, Node) else -number

    def constant(self, value: Any, name: str) -> Tensor | None:
        """The parameter that an argument is; None where there is none."""
        if value is None:
            return None
        if isinstance(value, Node) and value.op == "get_attr":
            found = self.parameter(value)
            if isinstance(found, Tensor):
                return found
        raise LookupError(f"its {name} is computed, not a parameter of the model")


Rule = Callable[..., Any]


def recipe_of(
    node: Node, numbers: set[Node], arithmetic: set[str], parameter: Callable[[Node], Any]
) -> Recipe | None:
    """The decomposition of a function into operators with a quantized form, or None."""
    if node.op not in ("call_function", "call_method"):
        return None
    owner = node.args[0] if node.args else None
    # A method of an arithmetic module, which is quantized as it is.
    if isinstance(owner, Node) and owner.op == "get_attr" and owner.target in arithmetic:
        return None
    found = _RULES.get(node.target)
    if found is None:
        return None
    rule, hybrid = found
    recipe = Recipe(numbers, parameter)
    recipe.hybrid = hybrid
    # `out=None` says nothing; any other is an argument that no rule has.
    given = {name: value for name, value in node.kwargs.items() if (name, value) != ("out", None)}
    try:
        bound = inspect.signature(rule).bind(recipe, *node.args, **given)
        result = rule(*bound.args, **bound.kwargs)
    except (TypeError, LookupError) as error:  # arguments that the operators do not have
        node.meta["reason"] = str(error).removeprefix("got ")
        return None
    if result is None:
        return None
    recipe.result = result
    return recipe


def _add(r: Recipe, input: Any, other: Any, *, alpha: Any = 1) -> Any:
    x, y = input, other
    if r.is_tensor(x) and r.is_tensor(y):
        return r.arithmetic("add", x, r.scaled(y, alpha))
    if not r.is_tensor(x):
        x, y = y, x
        if isinstance(y, int) and y == 0:  # where Python's sum begins
            return x
    if r.is_tensor(x) and r.is_number(y) and alpha == 1:
        return r.arithmetic("add_scalar", x, y)
    return None


def _sub(r: Recipe, input: Any, other: Any, *, alpha: Any = 1) -> Any:
    x, y = input, other
    if r.is_tensor(x) and r.is_tensor(y):
        return r.arithmetic("sub", x, r.scaled(y, alpha))
    if r.is_tensor(x) and r.is_number(y) and alpha == 1:
        return r.arithmetic("add_scalar", x, r.negated(y))
    if r.is_number(x) and r.is_tensor(y):
        return r.arithmetic("add_scalar", r.arithmetic("mul_scalar", y, -alpha), x)
    return None


def _mul(r: Recipe, input: Any, other: Any) -> Any:
    x, y = input, other
    if r.is_tensor(x) and r.is_tensor(y):
        return r.arithmetic("mul", x, y)
    if not r.is_tensor(x):
        x, y = y, x
    return r.arithmetic("mul_scalar", x, y) if r.is_tensor(x) and r.is_number(y) else None


def _div(r: Recipe, input: Any, other: Any, *, rounding_mode: Any = None) -> Any:
    x, y = input, other
    if rounding_mode is not None:
        raise LookupError(f"rounding_mode={rounding_mode!r}")
    if r.is_tensor(x) and r.is_tensor(y):
        return r.module("div", Div(), x, y)
    if r.is_tensor(x) and r.is_number(y):
        inverse = r.inverse(y)
        return None if inverse is None else r.arithmetic("mul_scalar", x, inverse)
    if r.is_number(x) and r.is_tensor(y):
        return r.scaled(r.module("reciprocal", functions.Reciprocal(), y), x)
    return None


def _pow(r: Recipe, input: Any, exponent: Any) -> Any:
    if not r.is_tensor(input):
        return None
    if isinstance(exponent, Node):
        raise LookupError("its exponent is known in the forward alone")
    return r.module("pow", functions.Pow(exponent), input)


def _of_two(method: str) -> Rule:
    def rule(r: Recipe, input: Any, other: Any) -> Any:
        tensors = r.is_tensor(input) and r.is_tensor(other)
        return r.arithmetic(method, input, other) if tensors else None

    return rule


def _matmul(r: Recipe, input: Any, mat2: Any = None, *, other: Any = None) -> Any:
    return r.arithmetic("matmul", input, other if mat2 is None else mat2)


def _addmm(
    r: Recipe, input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    product = r.scaled(r.arithmetic("matmul", batch1, batch2), alpha)
    return r.arithmetic("add", r.scaled(input, beta), product)


def _reduction(method: str) -> Rule:
    def rule(r: Recipe, input: Any, *dims: Any, **settings: Any) -> Any:
        unknown = sorted(set(settings) - {"dim", "keepdim"})
        if unknown:
            raise LookupError(f"{unknown[0]}={settings[unknown[0]]!r}")
        return r.arithmetic(method, input, *dims, **settings)

    return rule


def _stack(r: Recipe, tensors: Any, dim: int = 0) -> Any:
    if not isinstance(tensors, list | tuple):
        raise LookupError("its tensors are not written out as a list")
    return r.arithmetic("cat", [r.call("unsqueeze", x, dim) for x in tensors], dim=dim)


def _where(r: Recipe, condition: Any, input: Any, other: Any) -> Any:
    if not (r.is_tensor(input) or r.is_tensor(other)):
        raise LookupError("both of its values are numbers")
    return r.module("where", Where(), condition, input, other)


def _masked_fill(r: Recipe, input: Any, mask: Any, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise LookupError(f"no scale reaches {value}; nn.MultiheadAttention takes masks")
    return r.module("where", Where(), mask, value, input)


def _normalize(r: Recipe, input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Any:
    if p != 2:
        raise LookupError(f"p={p}: expected 2")
    return r.module("normalize", Normalize(dim, eps), input)


def _group_norm(
    r: Recipe, input: Any, num_groups: int, weight: Any = None, bias: Any = None,
    eps: float = 1e-5,
) -> Any:  # fmt: skip
    scale, shift = r.constant(weight, "weight"), r.constant(bias, "bias")
    if not isinstance(num_groups, int):
        raise LookupError("its number of groups is known in the forward alone")
    channels = num_groups if scale is None else scale.numel()
    made = nn.GroupNorm(num_groups, channels, eps, affine=scale is not None)
    _share(made, weight=scale, bias=shift)
    return r.module("group_norm", made, input)


def _layer_norm(
    r: Recipe, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None,
    eps: float = 1e-5,
) -> Any:  # fmt: skip
    scale, shift = r.constant(weight, "weight"), r.constant(bias, "bias")
    sizes = normalized_shape
    if isinstance(sizes, int) or (isinstance(sizes, Node) and scale is None):
        sizes = (sizes,)
    if scale is not None:
        sizes = tuple(scale.shape)
    if not isinstance(sizes, list | tuple):
        raise LookupError("its normalized_shape is known in the forward alone")
    if scale is None and shift is None:
        # Without parameters the number of axes is enough, and sizes may be traced ones.
        dims = tuple(range(-len(sizes), 0))
        if (
            len(sizes) == 1
            and isinstance(sizes[0], Node)
            and sizes[0].target is not operator.getitem
        ):
            raise LookupError("its normalized_shape is known in the forward alone")
        norm = LayerNorm([1] * len(sizes), eps, elementwise_affine=False, dim=dims)
        return r.module("layer_norm", norm, input)
    made = nn.LayerNorm(sizes, eps, bias=shift is not None)
    _share(made, weight=scale, bias=shift)
    return r.module("layer_norm", made, input)


def _share(module: nn.Module, **values: Tensor | None) -> None:
    """Have a new module compute with parameters that the model has already."""
    for name, value in values.items():
        if value is None:
            continue
        shared = value if isinstance(value, nn.Parameter) else nn.Parameter(value, False)
        setattr(module, name, shared)


def _linear(r: Recipe, input: Any, weight: Any, bias: Any = None) -> Any:
    values, shift = r.constant(weight, "weight"), r.constant(bias, "bias")
    assert values is not None
    # On the meta device: its own parameters make way at once.
    made = nn.Linear(values.shape[1], values.shape[0], shift is not None, device="meta")
    _share(made, weight=values, bias=shift)
    return r.module("linear", made, input)


def _conv2d(
    r: Recipe, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    values, shift = r.constant(weight, "weight"), r.constant(bias, "bias")
    assert values is not None
    kernel: Any = tuple(values.shape[2:])
    channels = values.shape[1] * groups, values.shape[0]
    settings = stride, padding, dilation, groups
    made = nn.Conv2d(*channels, kernel, *settings, bias=shift is not None, device="meta")
    _share(made, weight=values, bias=shift)
    return r.module("conv2d", made, input)


def _prelu(r: Recipe, input: Any, weight: Any) -> Any:
    slope = r.constant(weight, "weight")
    assert slope is not None
    made = nn.PReLU(slope.numel())
    _share(made, weight=slope)
    return r.module("prelu", made, input)


def _attention(
    r: Recipe, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0,
    is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if attn_mask is not None or is_causal or enable_gqa:
        raise LookupError(
            "of attn_mask, is_causal and enable_gqa it has no quantized form; "
            "nn.MultiheadAttention takes masks"
        )
    if scale is None:
        # The width is known in the forward alone.
        scale = r.call(operator.pow, r.call("size", query, -1), -0.5)
    scores = r.arithmetic("matmul", query, key, y_trans=True)
    scaled = r.arithmetic("mul_scalar", scores, scale)
    shares = r.module("softmax", nn.Softmax(-1), scaled)
    return r.arithmetic("matmul", shares, value)


def _einsum(r: Recipe, equation: Any, *operands: Any) -> Any:
    """A product of two tensors: axes brought into order, matmul, axes brought into order."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):  # torch's older form
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation or len(operands) != 2:
        raise LookupError("an einsum of two tensors without an ellipsis has a quantized form")
    given, _, result = equation.replace(" ", "").partition("->")
    left, _, right = given.partition(",")
    # Without an arrow the result has the axes that stand once, in alphabetical order.
    if "->" not in equation:
        result = "".join(sorted(axis for axis in {*given} - {","} if given.count(axis) == 1))
    if any(len({*axes}) != len(axes) for axes in (left, right, result)):
        raise LookupError("no axis may stand twice in one tensor")
    shared = [axis for axis in left if axis in right]
    batch = [axis for axis in shared if axis in result]
    inner = [axis for axis in shared if axis not in result]
    rows = [axis for axis in left if axis not in right]
    columns = [axis for axis in right if axis not in left]
    if any(axis not in result for axis in rows + columns):
        raise LookupError("an axis of one tensor alone is summed; sum it before")
    sides = []
    for axes, tensor, order in (
        (left, operands[0], (batch, rows, inner)),
        (right, operands[1], (batch, inner, columns)),
    ):
        # The summed axes innermost, and each group one axis: what matmul takes.
        places = [axes.index(axis) for part in order for axis in part]
        moved = tensor if places == sorted(places) else r.call("permute", tensor, *places)
        sides.append(_merged(r, moved, [len(part) for part in order]))
    product = r.arithmetic("matmul", *sides)
    made: Any = product
    if len(rows) != 1 or len(columns) != 1:
        # The groups taken apart again; with one axis each they are as they should be.
        sizes = [r.call("size", operands[0], left.index(axis)) for axis in batch + rows]
        sizes += [r.call("size", operands[1], right.index(axis)) for axis in columns]
        made = r.call("reshape", product, *sizes)
    places = [(batch + rows + columns).index(axis) for axis in result]
    if places != sorted(places):
        made = r.call("permute", made, *places)
    return made


def _merged(r: Recipe, x: Any, lengths: list[int]) -> Any:
    """The tensor with the last two of its groups of axes merged into one axis each."""
    batch, first, second = lengths
    if second == 0:
        x = r.call("unsqueeze", x, batch + first)
    elif second > 1:
        x = r.call("flatten", x, batch + first, batch + first + second - 1)
    if first == 0:
        x = r.call("unsqueeze", x, batch)
    elif first > 1:
        x = r.call("flatten", x, batch, batch + first - 1)
    return x


def _elementwise(operation: str, make: Callable[..., nn.Module]) -> Rule:
    def rule(r: Recipe, input: Any, *args: Any, **settings: Any) -> Any:
        # Arguments of torch's functions that its modules do not have.
        settings = {n: v for n, v in settings.items() if n not in ("_stacklevel", "inplace")}
        if any(isinstance(v, Node) for v in (*args, *settings.values())):
            raise LookupError("its arguments are known in the forward alone")
        if settings.get("dtype", 0) is None:  # the default of softmax; another one is refused
            del settings["dtype"]
        return r.module(operation, make(*args, **settings), input)

    return rule


_MODULES: dict[Any, tuple[str, Callable[..., nn.Module]]] = {
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), ("sigmoid", nn.Sigmoid)),
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), ("tanh", nn.Tanh)),
    **dict.fromkeys((torch.log, "log"), ("log", functions.HardLog)),
    torch.selu: ("selu", functions.Selu),
    **{
        spelling: (kind.function.__name__, kind)
        for kind in functions.ElementwiseFunction.__subclasses__()
        if kind.__name__.lower() == kind.function.__name__
        for spelling in (kind.function, kind.function.__name__)
    },
    **dict.fromkeys((F.softmax, torch.softmax, "softmax"), ("softmax", nn.Softmax)),
    F.glu: ("glu", nn.GLU),
    F.silu: ("silu", nn.SiLU),
    F.gelu: ("gelu", nn.GELU),
    F.mish: ("mish", nn.Mish),
    F.leaky_relu: ("leaky_relu", nn.LeakyReLU),
    F.elu: ("elu", nn.ELU),
    F.celu: ("celu", nn.CELU),
    F.softplus: ("softplus", nn.Softplus),
    F.logsigmoid: ("logsigmoid", nn.LogSigmoid),
    F.hardsigmoid: ("hardsigmoid", nn.Hardsigmoid),
    F.hardswish: ("hardswish", nn.Hardswish),
    F.avg_pool2d: ("avg_pool2d", nn.AvgPool2d),
    F.adaptive_avg_pool2d: ("adaptive_avg_pool2d", nn.AdaptiveAvgPool2d),
}
_RULES: dict[Any, tuple[Rule, str]] = {
    **{
        spelling: (rule, "on the BPU")
        for rule, spellings in (
            (_add, (operator.add, torch.add, "add", "__add__", "__radd__")),
            (_sub, (operator.sub, torch.sub, "sub", torch.subtract, "subtract", "__sub__")),
            (
                lambda r, input, other, **more: _sub(r, other, input, **more),
                (torch.rsub, "__rsub__"),
            ),
            (_mul, (operator.mul, torch.mul, "mul", torch.multiply, "multiply", "__mul__")),
            (_div, (operator.truediv, torch.div, torch.true_divide, torch.divide, "div")),
            (
                lambda r, input: r.arithmetic("mul_scalar", input, -1.0),
                (operator.neg, torch.neg, torch.negative, "neg", "negative", "__neg__"),
            ),
            (lambda r, input: input, (operator.pos, torch.positive, "positive")),
            (lambda r, input: r.arithmetic("mul", input, input), (torch.square, "square")),
            (_pow, (torch.pow, operator.pow, "pow", "__pow__")),
            (
                lambda r, input: r.module("rsqrt", functions.Pow(-0.5), input),
                (torch.rsqrt, "rsqrt"),
            ),
            (_matmul, (operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm", torch.mm, "mm")),
            (_addmm, (torch.baddbmm, "baddbmm", torch.addmm, "addmm")),
            (_of_two("maximum"), (torch.maximum, "maximum")),
            (_of_two("minimum"), (torch.minimum, "minimum")),
            (_reduction("mean"), (torch.mean, "mean")),
            (_reduction("sum"), (torch.sum, "sum")),
            (
                lambda r, *given, **settings: r.arithmetic("cat", *given, **settings),
                (torch.cat, torch.concat, torch.concatenate),
            ),
            (_stack, (torch.stack,)),
            (_einsum, (torch.einsum,)),
            (_linear, (F.linear,)),
            (_conv2d, (F.conv2d, torch.conv2d)),
            (_prelu, (F.prelu, torch.prelu)),
        )
        for spelling in spellings
    },
    **{spelling: (_elementwise(*made), "on the BPU") for spelling, made in _MODULES.items()},
    F.scaled_dot_product_attention: (_attention, "always"),
    torch.where: (_where, "never"),
    "where": (lambda r, input, condition, other: _where(r, condition, input, other), "never"),
    **dict.fromkeys((torch.masked_fill, "masked_fill"), (_masked_fill, "never")),
    F.normalize: (_normalize, "never"),
    **dict.fromkeys((F.group_norm, torch.group_norm), (_group_norm, "never")),
    **dict.fromkeys((F.layer_norm, torch.layer_norm), (_layer_norm, "never")),
}
