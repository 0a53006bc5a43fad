"""Finishing steps of a file, in the order in which a target lists them (`Profile.passes`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir


def scales_as_nodes(model: ir.Model) -> None:
    """Scale and zero point of each QuantizeLinear as nodes in front of it, for its pair.

    hb_mapper needs only one zero, for any number of scales.
    """
    import onnx_ir as ir

    for node in model.graph:
        if node.op_type != "QuantizeLinear":
            continue
        for slot, part in ((1, "scale"), (2, "zero_point")):
            value: Any = node.inputs[slot]
            array = value.const_value.numpy()
            array = array if part == "scale" else array.reshape(-1)[:1].reshape(())
            made = ir.Value(name=f"{node.name}.{part}")
            settings = {"value": ir.tensor(array, name="")}
            model.graph.insert_before(node, ir.node("Constant", [], settings, outputs=[made]))
            for reader in (node, *node.outputs[0].consumers()):
                reader.replace_input_with(slot, made)
    for name in [name for name, value in model.graph.initializers.items() if not value.uses()]:
        del model.graph.initializers[name]


def numbered_names(model: ir.Model) -> None:
    """Nodes named ``<operator>_<place>``, as hb_mapper's ``run_on_cpu`` lists them."""
    for place, node in enumerate(model.graph):
        node.name = f"{node.op_type}_{place}"
