"""The program behind an `IntegerModel`, for whoever writes it in another form: an exporter.

``simulate(model, example).program`` is a `Program`: `Step`s in order over named `Value`s, each held
as `Integers`, as accumulators or as floats. A step's arguments hold `Ref`s in nested containers;
`names_in` lists them and `replaced` puts values in their place. Maps lie channels last in memory;
`contiguous` turns them.

Each kind of step is a dataclass: `Quantize`, `Conv`, `LayoutCall` and the like, on a few bases
(`Stored`, `Weighted`, `Call`). `Step` is the base of all.

A package may make programs of its own: an `OperatorCall` calls an operator of torch's registry on
values of a `TensorType` and on the program's `constants`, `rounded` gives all steps another
rounding, `IntegerModel` runs them, and `to_document` and `from_document` are the content of a file.

Example:
    >>> import torch
    >>> from bevquant_int8sim import simulate
    >>> from bevquant_int8sim.program import Integers
    >>> from bevquant_qnn import quantize_model
    >>> from bevquant_quantizers import calibrate
    >>> x = torch.ones(1, 4)
    >>> model = quantize_model(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval()).model
    >>> _ = calibrate(model, [x])
    >>> program = simulate(model, x).program
    >>> [type(step).__name__ for step in program.steps]
    ['Quantize', 'Linear']
    >>> held = program.values[program.steps[0].outputs[0]].form
    >>> held.bits, held.low, held.high
    (8, -128, 127)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bevquant_graph import arguments
from bevquant_int8sim._sample import PADDINGS, SAMPLES, exact_samples, sampling_error
from bevquant_int8sim.model._float8 import (
    FLOAT8,
    ROUNDINGS,
    BlockLayer,
    Float8Layer,
    blocks_round,
    float8_round,
    float8_steps,
)
from bevquant_int8sim.model._form import Form, Integers, TensorType
from bevquant_int8sim.model._grid_operations import grid_call, module_call
from bevquant_int8sim.model._integer_steps import (
    Add,
    AvgPool,
    DeformableAttention,
    Dequantize,
    GridSample,
    Matmul,
    MaxPool,
    Quantize,
    Relu,
    Requantize,
    Resize,
    Rounds,
    Sample,
    Stored,
    WeightedSum,
)
from bevquant_int8sim.model._layer_sums import alike, float_gaps
from bevquant_int8sim.model._program import FloatFallback, Program, Value, in_single, rounded
from bevquant_int8sim.model._quantizers import integers_of, is_active
from bevquant_int8sim.model._rowwise import contiguous
from bevquant_int8sim.model._save import from_document, to_document
from bevquant_int8sim.model._step import (
    Call,
    Constant,
    Coordinates,
    FloatCall,
    FloatRelu,
    LayoutCall,
    NumberCall,
    OperatorCall,
    Ref,
    SparseRef,
    Step,
    names_in,
    replaced,
)
from bevquant_int8sim.model._weighted_steps import (
    Conv,
    ConvTranspose,
    Dense,
    Linear,
    SparseConv,
    Weighted,
)

__all__ = [
    "FLOAT8",
    "PADDINGS",
    "PROGRAM_READERS",
    "ROUNDINGS",
    "SAMPLES",
    "Add",
    "AvgPool",
    "BlockLayer",
    "Call",
    "Constant",
    "Conv",
    "ConvTranspose",
    "Coordinates",
    "DeformableAttention",
    "Dense",
    "Dequantize",
    "Float8Layer",
    "FloatCall",
    "FloatFallback",
    "FloatRelu",
    "Form",
    "GridSample",
    "Integers",
    "LayoutCall",
    "Linear",
    "Matmul",
    "MaxPool",
    "NumberCall",
    "OperatorCall",
    "Program",
    "Quantize",
    "Ref",
    "Relu",
    "Requantize",
    "Resize",
    "Rounds",
    "Sample",
    "SparseConv",
    "SparseRef",
    "Step",
    "Stored",
    "TensorType",
    "Value",
    "Weighted",
    "WeightedSum",
    "alike",
    "arguments",
    "blocks_round",
    "contiguous",
    "exact_samples",
    "float8_round",
    "float8_steps",
    "float_gaps",
    "from_document",
    "grid_call",
    "in_single",
    "integers_of",
    "is_active",
    "module_call",
    "names_in",
    "replaced",
    "rounded",
    "sampling_error",
    "to_document",
]

PROGRAM_READERS: dict[type[nn.Module], Callable[[nn.Module, Any], Any]] = {}
"""How a package tells its own models' programs: a class of modules that such models hold, to a
function of the whole model and example inputs. `bevquant_export.QdqProgram` says what it returns;
what it raises the exporter's caller reads. Models that hold none of these are simulated."""
