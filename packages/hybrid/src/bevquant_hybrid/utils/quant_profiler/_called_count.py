"""How often a run calls each operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from bevquant_hybrid.utils.quant_profiler._calls import record_calls
from bevquant_hybrid.utils.quant_profiler._leaves import named_operators
from bevquant_hybrid.utils.quant_profiler._tables import simple_table

__all__ = ["get_module_called_count"]


def get_module_called_count(
    model: nn.Module,
    example_inputs: Any,
    check_leaf_module: Callable[[nn.Module], bool] | None = None,
    print_tabulate: bool = True,
) -> dict[str, int]:
    """Count the calls of each operator in one run: 0 for unused ones, above 1 for shared ones.

    Args:
        model: Float, calibration, QAT or converted model.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        check_leaf_module: Whether a module is one operator; None for this package's modules,
            torch's, and those that hold no others.
        print_tabulate: Print the table.

    Returns:
        Calls by name, in the order of the modules' definition.

    Warns:
        UserWarning: A module has several names; its calls are counted under the first.

    Example:
        >>> _ = get_module_called_count(nn.Sequential(nn.ReLU(), nn.ReLU()), __import__("torch").ones(1))
        name      called times
        ------  --------------
        0                    1
        1                    1
    """  # noqa: E501
    operators, again = named_operators(model, check_leaf_module)
    for name, first in again.items():
        warnings.warn(
            f"get_module_called_count: {name} is the same module as {first}; its calls are "
            f"counted as those of {first}",
            UserWarning,
            stacklevel=2,
        )
    counts = dict.fromkeys(operators, 0)
    for call in record_calls(
        model, example_inputs, keep=False, check_leaf_module=check_leaf_module
    ):
        if call.module is not None:
            counts[call.path] += 1
    if print_tabulate:
        print(simple_table(["name", "called times"], [[n, c] for n, c in counts.items()]))
    return counts
