"""SubM convolutions of spconv 1 that share an ``indice_key`` but have different kernels.

spconv 1, and mmcv with its copy, build one rulebook for each key, with the kernel of the module
that runs first. Element k of another module's weight, row-major, multiplies the neighbours at
element k of that kernel; further elements are not read. Published weights of Cylinder3D were
trained so. spconv 2 refuses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

from torch import nn

from bevquant_sparse._layout import WeightLayout, permute_weight
from bevquant_sparse._modules import get_weight, is_spconv1, layout_of, weight_name
from bevquant_sparse._rulebook import Rulebook
from bevquant_sparse._rulebook_cache import borrows, kernel_of

Kernel = tuple[tuple[int, ...], tuple[int, ...]]
"""Size and dilation."""


def shared_keys(model: nn.Module) -> dict[str, list[str]]:
    """Paths of SubM convolutions by key, where a key has modules of different kernels."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for path, module in model.named_modules():
        key = getattr(module, "indice_key", None)
        if key is not None and getattr(module, "subm", False) and is_spconv1(module):
            found[key][path] = kernel_of(module, int(module.ndim))
    kernels = {key: {k for k in paths.values() if prod(k[0]) > 1} for key, paths in found.items()}
    return {key: list(paths) for key, paths in found.items() if len(kernels[key]) > 1}


def borrowed_kernels(model: nn.Module, run: Callable[[], object]) -> dict[str, Kernel]:
    """Convolutions that run along the rulebook of another kernel, with its size and dilation.

    In spconv 1, and in mmcv's copy of it, the SubM convolutions of one ``indice_key`` use the
    rulebook of the first one that runs, whatever their own kernel is.

    Args:
        model: On these kernels (`bevquant_sparse.use_bevquant_kernels`); not changed.
        run: Runs ``model`` on an example. It is not called where all kernels of a key are equal.

    Returns:
        By path, for `bevquant_sparse.adopt_kernels`.

    Raises:
        ValueError: A module ran along rulebooks of different kernels.

    Example:
        >>> borrowed_kernels(nn.Sequential(nn.ReLU()), lambda: None)
        {}
    """
    paths = [path for group in shared_keys(model).values() for path in group]
    met: dict[str, set[Kernel]] = {path: set() for path in paths}
    with ExitStack() as stack:
        for path in paths:
            hook = partial(_note, met[path])
            stack.callback(model.get_submodule(path).register_forward_pre_hook(hook).remove)
        if paths:
            run()
    borrowed: dict[str, Kernel] = {}
    for path, kernels in met.items():
        module: Any = model.get_submodule(path)
        if len(kernels) > 1:
            shown = " and ".join(str(kernel) for kernel, _ in sorted(kernels))
            raise ValueError(
                f"{path} runs along rulebooks of kernel sizes {shown} under "
                f"indice_key={module.indice_key!r}; give the layers of each kernel size a key"
            )
        if kernels - {kernel_of(module, module.ndim)}:
            borrowed[path] = kernels.pop()
    return borrowed


def adopt_kernels(model: nn.Module, borrowed: Mapping[str, Kernel]) -> None:
    """Give convolutions that run along the rulebook of another kernel its size, in place.

    A module then has the kernel size and dilation that it runs with, and the elements of its weight
    that are read, in a new parameter. Its results are the same. Quantization, integers and files
    need this form.

    Args:
        model: The model, or a copy of it.
        borrowed: `bevquant_sparse.borrowed_kernels` of it.

    Example:
        >>> adopt_kernels(nn.Sequential(nn.ReLU()), {})
    """
    for path, (kernel, dilation) in borrowed.items():
        module: Any = model.get_submodule(path)
        read = get_weight(module, WeightLayout.VCK).detach()[: prod(kernel)]
        new = permute_weight(read, WeightLayout.VCK, layout_of(module), kernel_size=kernel).clone()
        old = getattr(module, weight_name(module))
        setattr(module, weight_name(module), nn.Parameter(new, requires_grad=old.requires_grad))
        module.kernel_size, module.dilation = kernel, dilation


def _note(met: set[Kernel], module: Any, args: tuple[Any, ...]) -> None:
    """Kernel and dilation of the rulebook that the module runs along."""
    kept = args[0].indice_dict.get(module.indice_key)
    if isinstance(kept, Rulebook) and borrows(module, kept):
        met.add((kept.kernel_size, kept.dilation))
    else:
        met.add(kernel_of(module, module.ndim))
