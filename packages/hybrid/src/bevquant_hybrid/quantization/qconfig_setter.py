"""Settings of a model by templates for the types of outputs, inputs and weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import Node

from bevquant_hybrid._fx._placement import has_weight
from bevquant_hybrid._fx._settings import anchor_path_of
from bevquant_hybrid._fx._tracer import called_path
from bevquant_hybrid.dtype import QuantDType, as_quant_dtype, qint8, qint16
from bevquant_hybrid.quantization.qconfig import get_qconfig

__all__ = [
    "ConvDtypeTemplate",
    "MatmulDtypeTemplate",
    "ModuleNameQconfigSetter",
    "ModuleNameTemplate",
    "QconfigSetter",
    "QconfigSetterBase",
    "calibration_8bit_weight_16bit_act_qconfig_setter",
    "default_calibration_qconfig_setter",
    "default_qat_fixed_act_qconfig_setter",
    "default_qat_fixed_qconfig_setter",
    "default_qat_qconfig_setter",
    "qat_8bit_weight_16bit_act_qconfig_setter",
    "qat_8bit_weight_16bit_fixed_act_qconfig_setter",
]


class Call:
    """An operator that templates can select.

    Attributes:
        path: Path of its module; for a function, the name of the module that prepare makes.
        kind: ``"conv"``, ``"matmul"`` or ``""``.
        inputs: The producers of its inputs, skipping calls that pass values on.
        dtype: Type of its output.
        weight: Type of its weight.
    """

    def __init__(self, path: str, kind: str, inputs: list[Call]) -> None:
        self.path, self.kind, self.inputs = path, kind, inputs
        self.dtype: QuantDType = qint8
        self.weight: QuantDType = qint8


def _is_under(path: str, prefix: str | None) -> bool:
    return not prefix or path == prefix or path.startswith(f"{prefix}.")


def _type(value: Any, what: str) -> QuantDType:
    try:
        return as_quant_dtype(value)
    except ValueError as error:
        raise ValueError(
            f"{what}: {value!r}: expected qint8 or qint16; what computes in float16 has no "
            "integers, and stays float with the qconfig None"
        ) from error


class ModuleNameTemplate:
    """Types of outputs by module name; ``""`` is the model.

    Args:
        module_name_to_dtype: ``{"": qint8, "head": qint16}``, or ``{"head": {"output": qint16}}``
            (or ``"dtype"``). A name covers the module and its submodules; longer names take
            precedence.

    Raises:
        ValueError: An unsupported type, or a further setting (``"threshold"``), whose effect on the
            scale public documents do not define.

    Example:
        >>> template = ModuleNameTemplate({"": qint8, "head": {"output": qint16}})
        >>> template.dtypes["head"]
        qint16
    """

    def __init__(self, module_name_to_dtype: Mapping[str, Any]) -> None:
        self.dtypes: dict[str, QuantDType] = {}
        for name, given in module_name_to_dtype.items():
            what = f"ModuleNameTemplate: {name!r}"
            if isinstance(given, Mapping):
                unknown = sorted(set(given) - {"dtype", "output"})
                if unknown or len(given) != 1:
                    raise ValueError(f"{what}: {dict(given)}: expected 'dtype' or 'output' alone")
                given = next(iter(given.values()))
            self.dtypes[name] = _type(given, what)

    def apply(self, calls: Sequence[Call]) -> None:
        """Set the types of outputs."""
        # Longer names come later, and so win.
        for name in sorted(self.dtypes, key=len):
            for call in calls:
                if _is_under(call.path, name):
                    call.dtype = self.dtypes[name]


class ConvDtypeTemplate:
    """Types of inputs and weights of convolutions and linear layers.

    The producer of an input has one output type, which applies to all its consumers.

    Args:
        input_dtype: ``qint8`` or ``qint16``.
        weight_dtype: ``qint8``.
        prefix: Name of the module that it is about; None for the model.
    """

    def __init__(
        self, input_dtype: Any = qint8, weight_dtype: Any = qint8, prefix: str | None = None
    ) -> None:
        self.input_dtype = _type(input_dtype, "ConvDtypeTemplate: input_dtype")
        self.weight_dtype = _type(weight_dtype, "ConvDtypeTemplate: weight_dtype")
        self.prefix = prefix

    def apply(self, calls: Sequence[Call]) -> None:
        """Set the types of inputs and weights."""
        for call in calls:
            if call.kind == "conv" and _is_under(call.path, self.prefix):
                call.weight = self.weight_dtype
                for source in call.inputs[:1]:
                    source.dtype = self.input_dtype


class MatmulDtypeTemplate:
    """Types of the inputs of matrix products.

    Args:
        input_dtypes: One type, or one for each input.
        prefix: Name of the module that it is about; None for the model.
    """

    def __init__(self, input_dtypes: Any = qint8, prefix: str | None = None) -> None:
        single = isinstance(input_dtypes, str) or not isinstance(input_dtypes, Sequence)
        given = [input_dtypes] * 2 if single else list(input_dtypes)
        if len(given) != 2:
            raise ValueError(f"MatmulDtypeTemplate: input_dtypes={input_dtypes!r}: expected two")
        self.input_dtypes = [_type(dtype, "MatmulDtypeTemplate: input_dtypes") for dtype in given]
        self.prefix = prefix

    def apply(self, calls: Sequence[Call]) -> None:
        """Set the types of inputs."""
        for call in calls:
            if call.kind == "matmul" and _is_under(call.path, self.prefix):
                for source, dtype in zip(call.inputs, self.input_dtypes, strict=False):
                    source.dtype = dtype


class QconfigSetterBase:
    """Base of classes that set the qconfigs of a model's modules."""

    def qconfigs(self, graph: Any, root: nn.Module) -> dict[str, Any]:
        """Qconfigs by names, ``""`` for the model."""
        raise NotImplementedError


class QconfigSetter(QconfigSetterBase):
    """Settings by templates, applied in order: later ones take precedence.

    Args:
        reference_qconfig: Observers and all settings but the types.
        templates: `ModuleNameTemplate`, `ConvDtypeTemplate`, `MatmulDtypeTemplate`.
        enable_optimize: Accepted; no template is changed.
        save_dir: Accepted; nothing is written.
        custom_qconfig_mapping: Qconfigs by names, which take precedence over all templates.

    Example:
        >>> setter = QconfigSetter(get_qconfig(), [ModuleNameTemplate({"": qint8})])
    """

    def __init__(
        self,
        reference_qconfig: Any,
        templates: Sequence[Any],
        enable_optimize: bool = False,
        save_dir: Any = None,
        custom_qconfig_mapping: Mapping[str, Any] | None = None,
    ) -> None:
        for template in templates:
            if not hasattr(template, "apply"):
                raise TypeError(f"QconfigSetter: {template!r}: expected a template")
        self.reference_qconfig, self.templates = reference_qconfig, list(templates)
        self.custom = dict(custom_qconfig_mapping or {})

    def qconfigs(self, graph: Any, root: nn.Module) -> dict[str, Any]:
        """Qconfigs by names, ``""`` for the model."""
        calls = _calls(graph, root)
        for template in self.templates:
            template.apply(calls)
        found = {"": self.reference_qconfig}
        for call in calls:
            found[call.path] = _of_types(self.reference_qconfig, call.dtype, call.weight)
        return {**found, **self.custom}


class ModuleNameQconfigSetter(QconfigSetterBase):
    """Qconfigs by the names of modules.

    Args:
        module_name_to_qconfig: Qconfigs by names.
    """

    def __init__(self, module_name_to_qconfig: Mapping[str, Any]) -> None:
        self.given = dict(module_name_to_qconfig)

    def qconfigs(self, graph: Any, root: nn.Module) -> dict[str, Any]:
        """The given qconfigs."""
        return self.given


class _OneForAll(QconfigSetterBase):
    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def qconfigs(self, graph: Any, root: nn.Module) -> dict[str, Any]:
        return {"": get_qconfig(**self.settings)}


default_qat_qconfig_setter = _OneForAll()
default_qat_fixed_qconfig_setter = _OneForAll(fix_scale=True)
default_qat_fixed_act_qconfig_setter = default_qat_fixed_qconfig_setter
default_calibration_qconfig_setter = _OneForAll(observer="mse")
calibration_8bit_weight_16bit_act_qconfig_setter = _OneForAll(observer="mse", out_dtype=qint16)
qat_8bit_weight_16bit_act_qconfig_setter = _OneForAll(out_dtype=qint16)
qat_8bit_weight_16bit_fixed_act_qconfig_setter = _OneForAll(out_dtype=qint16, fix_scale=True)


def _of_types(qconfig: Any, dtype: QuantDType, weight: QuantDType) -> Any:
    """Return a qconfig with other types."""
    changed = {}
    for name, value in (("activation", dtype), ("weight", weight)):
        maker = getattr(qconfig, name)
        changed[name] = None if maker is None else functools.partial(maker, dtype=value)
    return qconfig._replace(**changed)


def _calls(graph: Any, root: nn.Module) -> list[Call]:
    """The calls of modules in a fused graph, with the producers of their inputs."""
    modules = dict(root.named_modules(remove_duplicate=False))
    made: dict[Node, Call] = {}

    def sources(node: Node) -> list[Call]:
        found: list[Call] = []
        for value in node.all_input_nodes:
            if value in made:
                found.append(made[value])
            # Functions pass values on.
            elif value.op in ("call_function", "call_method"):
                found += sources(value)
        return found

    for node in graph.nodes:
        path = called_path(node)
        module = modules.get(path) if path else None
        if module is None:
            continue
        kind = "matmul" if node.op == "call_method" and node.target == "matmul" else ""
        if has_weight(module):
            kind = "conv"
        made[node] = Call(anchor_path_of(module, path), kind, sources(node))
    return list(made.values())
