"""Run a model once and write down every operator call, with shapes and dtypes.

The model runs for real, on the example inputs: control flow that depends on shapes or values is no
obstacle, and what is written down is what was computed. Modules that a row describes count as one
call; between them torch's functions and tensor methods are caught one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.ao.quantization import FakeQuantizeBase

from ._attributes import tensors_in
from ._call import OperatorCall
from ._recorder import DtypeOf, Recorder
from ._scripted import read_script
from ._table import SupportTable, load_support_table


def trace_calls(
    model: nn.Module,
    example_inputs: Any,
    *,
    input_dtype: str = "float32",
    dtype_of: DtypeOf | None = None,
    table: SupportTable | None = None,
) -> list[OperatorCall]:
    """List the operator calls of one run of ``model``, in the order of execution.

    Args:
        model: A module or `torch.fx.GraphModule`. It runs in eval mode, without gradients and
            with no observer looking on; modes and observers are put back afterwards. Or a
            converted model that `torch.jit.trace` has traced.
        example_inputs: One tensor, or a tuple or list of the forward's arguments.
        input_dtype: Dtype of the inputs: ``"qint8"`` for a part of a model that starts on the BPU.
        dtype_of: Asked with path and module (None for a function) for the dtype of each output;
            None leaves it to the model: a quantize stub makes ``qint8``, a dequantize stub
            ``float32``, a layer whose qconfig has no activation ``qint32``, a module with an
            ``activation_post_process`` its dtype, and all others keep the dtype of their input.
        table: Another support table than the package's own.

    Raises:
        RuntimeError: If the model does not run on ``example_inputs``.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> calls = trace_calls(model, torch.ones(1, 3, 8, 8), input_dtype="qint8")
        >>> [(call.path, call.operator, call.output_shape) for call in calls]
        [('0', 'torch.nn.Conv2d', (1, 8, 6, 6)), ('1', 'torch.nn.ReLU', (1, 8, 6, 6))]
    """
    inputs = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else None
    inputs = (example_inputs,) if inputs is None else inputs
    if isinstance(model, torch.jit.ScriptModule):
        return read_script(model, inputs, input_dtype, table or load_support_table())
    recorder = Recorder(model, table or load_support_table(), dtype_of)
    for value in tensors_in(inputs):
        recorder.know(value, input_dtype, "")
    modes = {module: module.training for module in model.modules()}
    looking = {m: m.observer_enabled.clone() for m in modes if isinstance(m, FakeQuantizeBase)}
    with ExitStack() as stack:
        stack.callback(_put_back, modes, looking)
        model.eval()
        for fake_quant in looking:
            fake_quant.observer_enabled.zero_()  # its range is that of other inputs than these
        stack.enter_context(torch.no_grad())
        stack.callback(recorder.detach)
        recorder.attach()
        stack.enter_context(recorder)
        try:
            if isinstance(model, fx.GraphModule):
                outputs = _NodeByNode(model, recorder).run(*inputs)
            else:
                outputs = model(*inputs)
        except Exception as error:
            where = recorder.scope or "the model"
            raise RuntimeError(
                f"{where} does not run on the example inputs: {type(error).__name__}: {error}"
            ) from error
    return recorder.finish(outputs)


def _put_back(modes: Mapping[nn.Module, bool], looking: Mapping[FakeQuantizeBase, Tensor]) -> None:
    for module, training in modes.items():
        module.training = training
    for fake_quant, enabled in looking.items():
        fake_quant.observer_enabled.copy_(enabled)


class _NodeByNode(fx.Interpreter):
    """Runs a graph and tells the recorder the name of each node."""

    def __init__(self, model: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(model)
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        self._recorder.node = n.name
        return super().run_node(n)
