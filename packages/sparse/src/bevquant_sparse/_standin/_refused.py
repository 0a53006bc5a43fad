"""Names of spconv that models import and the stand-in cannot compute: they raise when called."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

_MODULES_RUN = "use spconv's modules, which run on bevquant_sparse's kernels"
_RULEBOOK = "bevquant_sparse.build_rulebook gives the pairs of a convolution"
_VOXELS = "use spconv.pytorch.utils.PointToVoxel, which takes torch tensors"
_BOXES = "install spconv for it"
_CALLS: dict[str, dict[str, str]] = {
    "spconv.utils": {
        **dict.fromkeys([f"Point2VoxelCPU{ndim}d" for ndim in range(1, 5)], _VOXELS),
        **dict.fromkeys(
            (
                "BoxOps", "non_max_suppression_cpu", "rbbox_intersection", "rbbox_iou",
                "rbbox_iou_loss", "rotate_non_max_suppression_cpu",
            ),
            _BOXES,
        ),
    },
    "spconv.pytorch.hash": {"HashTable": "use torch.unique or a sorted key"},
    "spconv.pytorch.ops": {
        **dict.fromkeys(("get_indice_pairs", "get_indice_pairs_implicit_gemm"), _RULEBOOK),
        **dict.fromkeys(
            (
                "indice_conv", "indice_conv_backward", "fused_indice_conv", "implicit_gemm",
                "implicit_gemm_backward", "indice_maxpool", "indice_maxpool_backward",
                "indice_maxpool_implicit_gemm", "indice_avgpool_implicit_gemm",
                "global_pool_rearrange",
            ),
            _MODULES_RUN,
        ),
    },
    "spconv.pytorch.functional": dict.fromkeys(
        (
            "indice_conv", "indice_inverse_conv", "indice_subm_conv", "implicit_gemm",
            "indice_maxpool", "indice_maxpool_implicit_gemm", "indice_avgpool_implicit_gemm",
        ),
        _MODULES_RUN,
    ),
}  # fmt: skip


def refused(home: str) -> dict[str, Any]:
    """The refused names of a module of spconv: classes that cannot be called."""
    return {name: _refused(home, name, remedy) for name, remedy in _CALLS[home].items()}


def _refused(home: str, name: str, remedy: str) -> type:
    def refuse(cls: type, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{home}.{name}: bevquant_sparse stands in for spconv here and does not have it; "
            f"{remedy}"
        )

    return type(name, (), {"__new__": refuse, "__module__": home})


def made_modules(identity: type) -> list[ModuleType]:
    """Modules of spconv that have no file of their own."""
    contents: dict[str, dict[str, Any]] = {
        "spconv.utils": refused("spconv.utils"),
        "spconv.pytorch.hash": refused("spconv.pytorch.hash"),
        "spconv.pytorch.ops": refused("spconv.pytorch.ops")
        | {
            "get_conv_output_size": get_conv_output_size,
            "get_deconv_output_size": get_deconv_output_size,
        },
        "spconv.pytorch.identity": {"Identity": identity},
    }
    modules = []
    for home, names in contents.items():
        module = ModuleType(home)
        vars(module).update(names)
        modules.append(module)
    return modules


def get_conv_output_size(
    input_size: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int],
) -> list[int]:  # fmt: skip
    """``(size + 2·padding − dilation·(kernel − 1) − 1) // stride + 1``; 1 for a kernel of −1."""
    axes = zip(input_size, kernel_size, stride, padding, dilation, strict=True)
    return [1 if k == -1 else (n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]


def get_deconv_output_size(
    input_size: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], output_padding: Sequence[int],
) -> list[int]:  # fmt: skip
    """``(size − 1)·stride − 2·padding + kernel + output_padding``, without the dilation."""
    axes = zip(input_size, kernel_size, stride, padding, output_padding, strict=True)
    return [(n - 1) * s - 2 * p + k + more for n, k, s, p, more in axes]
