"""One call of a forward, and the form (integer or float) of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bevquant_hybrid.qtensor import QTensor
from bevquant_int8sim.program import Form, Integers, Ref, Step

SUM = ":sum"  # behind the name of a fused addition: what the layer gives before


@dataclass(frozen=True)
class Call:
    """A call while a model is read.

    Attributes:
        name: Of the value that it makes.
        path: Module that is called; of a function, the one whose forward calls it.
        args: Positional arguments; values are `Ref`s.
        kwargs: Named ones.
        given: Positional arguments as they are in the example.
        result: What it makes there.
        on_cpu: Whether it runs on the CPU although a BPU could run it.
        reason: Reason of float computation, if any.
    """

    name: str
    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: tuple[Any, ...]
    result: Any
    on_cpu: bool
    reason: str

    @property
    def form(self) -> Form:
        """How its result is held."""
        return form_of(self.result, self.path)

    def step(
        self,
        op: str,
        what: str,
        args: tuple[Any, ...],
        *,
        output: str = "",
        attributes: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Step:
        """A step of this call; `output` where it does not make the call's own value."""
        given = op in ("dequantize", "constant", "host")
        bare = not given and not any(isinstance(part, QTensor) for part in tree_leaves(self.result))
        return Step(
            op,
            self.path,
            args,
            (output or self.name,),
            attributes={"what": what, "on_cpu": self.on_cpu, **(attributes or {})},
            reason=self.reason if bare else "",
            **others,
        )

    def function(
        self, what: str, args: tuple[Any, ...], *, output: str = "", **kwargs: Any
    ) -> Step:
        """A step that an exporter knows by the name of a function."""
        return self.step("float", what, args, output=output, kwargs=kwargs)

    def module(self, module: nn.Module, x: Ref, *, output: str = "") -> Step:
        """A step that an exporter knows by a module of torch."""
        return self.step("float", type(module).__name__, (x,), output=output, module=module)


def form_of(value: Any, path: str) -> Form:
    """Integers of eight bits, or floats.

    Raises:
        ValueError: Integers of sixteen bits.
    """
    if isinstance(value, list | tuple):
        forms = {form_of(part, path) for part in value if isinstance(part, Tensor)}
        return forms.pop() if len(forms) == 1 else "float"
    if not isinstance(value, QTensor):
        return "float"
    if value.dtype == "qint16":
        raise ValueError(
            f"export_qdq_onnx: {path or 'the model'}: its result is quantized to 16 bits, which "
            "QuantizeLinear makes from operator set 21 on; files are of set 11 or 13. Give it a "
            "qint8 qconfig, or run it on the CPU (hybrid_dict)"
        )
    if value.dtype == "qint8" and value.has_one_scale:
        return Integers(float(value.scale.detach().reshape(-1)[0]), 8, -128, 127)
    return "float"


def held(value: Any) -> Any:
    """A value as it is held: integers where it has eight bits, else floats."""
    if isinstance(value, list | tuple):
        return tuple(held(part) for part in value)
    if not isinstance(value, QTensor):
        return value
    return value.int_repr() if form_of(value, "") != "float" else value.dequantize()


def has_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a container that holds one."""
    return any(isinstance(part, Tensor) for part in tree_leaves(value))
