"""One graph of a model, captured by `torch.export` and proved by replay; one table of operators.

>>> import torch
>>> from torch import nn
>>> from bevquant_graph import capture
>>> capture(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.ones(3, 4))
Graph of Sequential: 2 operations
"""

from ._attributes import frames_remedy, leaves, same_constant
from ._batch_arguments import Forward, as_example, on_batch
from ._calls import Followed, FunctionCalls
from ._capture import capture
from ._copies import copied
from ._deformable import attend_levels, deformable_attention
from ._faults import (
    CallError,
    CaptureError,
    all_finite,
    first_fault,
    forward_line,
    problem_of,
    refuse_unusable,
    reported_by,
    running,
)
from ._graph import Graph
from ._guards import only_guards
from ._held import replace_modules
from ._html_table import HtmlTable, HtmlText
from ._kinds import check_kind, checked_batches, file_path, run_on
from ._layer_class import is_library_class, layer_class, own_code, zero_padding
from ._memory import WithMemory, in_sequence, with_memory
from ._normal import called_name
from ._opaque import OPAQUE, Opaque, fixed_sizes, refuse_other_sizes
from ._operators import ALIASES, OPERATORS, OpSpec, op_spec
from ._own_inputs import own_inputs
from ._part import named_results, nodes_behind, part_of
from ._program import as_module, module_of
from ._quiet import evaluation, quiet, without_autocast
from ._read_members import ReadMembers, in_order, rearranged
from ._registrations import registered_once
from ._signature import (
    arguments,
    flatten,
    input_tensor,
    is_sparse_tensor,
    leaf_names,
    map_leaves,
    members_of,
    rebuild,
    refilled,
    refuse_other_members,
)
from ._size_guards import Guard, Sizes, check_guards
from ._state import alone, called, ordinary_tensors, state_kept
from ._symbolic import trace_around
from ._tidy import PASSED_OVER, REQUIRE, TENSOR_FORMS

__version__ = "0.2.0"
__all__ = [
    "ALIASES",
    "OPAQUE",
    "OPERATORS",
    "PASSED_OVER",
    "REQUIRE",
    "TENSOR_FORMS",
    "CallError",
    "CaptureError",
    "Followed",
    "Forward",
    "FunctionCalls",
    "Graph",
    "Guard",
    "HtmlTable",
    "HtmlText",
    "OpSpec",
    "Opaque",
    "ReadMembers",
    "Sizes",
    "WithMemory",
    "all_finite",
    "alone",
    "arguments",
    "as_example",
    "as_module",
    "attend_levels",
    "called",
    "called_name",
    "capture",
    "check_guards",
    "check_kind",
    "checked_batches",
    "copied",
    "deformable_attention",
    "evaluation",
    "file_path",
    "first_fault",
    "fixed_sizes",
    "flatten",
    "forward_line",
    "frames_remedy",
    "in_order",
    "in_sequence",
    "input_tensor",
    "is_library_class",
    "is_sparse_tensor",
    "layer_class",
    "leaf_names",
    "leaves",
    "map_leaves",
    "members_of",
    "module_of",
    "named_results",
    "nodes_behind",
    "on_batch",
    "only_guards",
    "op_spec",
    "ordinary_tensors",
    "own_code",
    "own_inputs",
    "part_of",
    "problem_of",
    "quiet",
    "rearranged",
    "rebuild",
    "refilled",
    "refuse_other_members",
    "refuse_other_sizes",
    "refuse_unusable",
    "registered_once",
    "replace_modules",
    "reported_by",
    "run_on",
    "running",
    "same_constant",
    "state_kept",
    "trace_around",
    "with_memory",
    "without_autocast",
    "zero_padding",
]
