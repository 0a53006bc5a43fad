"""All checks of two forms of a model on one page."""

from __future__ import annotations

import contextlib
import html
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_hybrid.nn.quantized import FixedPoint
from bevquant_hybrid_tools.quant_profiler._calls import get_module_called_count
from bevquant_hybrid_tools.quant_profiler._compared import compare_weights
from bevquant_hybrid_tools.quant_profiler._featuremap import featuremap_similarity
from bevquant_hybrid_tools.quant_profiler._features import get_raw_features, profile_featuremap
from bevquant_hybrid_tools.quant_profiler._qconfig import check_qconfig, check_unfused_operations
from bevquant_hybrid_tools.quant_profiler._tables import curves_picture, page, write_text

# "prepared": one class of fake quantizer serves calibration and training.
_FORMS = {
    "FvsQ": ("float", "prepared"),
    "QvsQ": ("prepared", "converted"),
    "CvsQ": ("prepared", "prepared"),
}
_TOOLS = (
    *("featuremap_similarity", "get_raw_features", "profile_featuremap"),
    *("get_module_called_count", "check_unfused_operations", "compare_weights", "check_qconfig"),
)


def model_profiler(
    model1: nn.Module,
    model2: nn.Module,
    example_inputs: Any,
    mode: str,
    out_dir: str | os.PathLike[str] | None = None,
    kwargs_dict: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Run the other tools on two neighbouring forms of a model; show all on ``profiler.html``.

    Similarities, statistics and calls of both, weights; for a float model the layers that could be
    fused, for a prepared one its qconfigs. The tools' own files lie beside the page, the statistics
    as ``model1_statistic`` and ``model2_statistic``; nothing is printed.

    Args:
        model1: Float, calibration or QAT model.
        model2: The next form of it.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        mode: ``"FvsQ"``: float, then calibration or QAT; ``"QvsQ"``: QAT, then converted;
            ``"CvsQ"``: calibration, then QAT.
        out_dir: Folder of the files; None for ``horizon_quant_debug`` in the current one.
        kwargs_dict: Further arguments by the name of the tool.

    Returns:
        The path of the page.

    Raises:
        ValueError: An unknown mode or tool, models that the mode does not mean, or an argument that
            is given here already.
    """
    _check(model1, model2, mode)
    given = _arguments(kwargs_dict)
    folder = Path("horizon_quant_debug") if out_dir is None else Path(out_dir)
    inputs, models = example_inputs, (model1, model2)
    sections: list[tuple[str, str]] = []

    def run(tool: Any, *args: Any, **fixed: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            result = tool(*args, **{**given[tool.__name__], **fixed})
        return result, printed.getvalue()

    rows, _ = run(featuremap_similarity, *models, inputs, out_dir=folder)
    names = [f"{row[0]} {row[1]}" for row in rows]
    curve = curves_picture(names, {"similarity": [row[3] for row in rows]})
    sections.append(("Similarity", curve + _text(folder / "similarity.txt")))
    for i, model in enumerate(models, 1):
        features, _ = run(get_raw_features, model, inputs)
        name = f"model{i}_statistic"
        run(profile_featuremap, features, out_dir=folder, file_name=name)
        sections.append((f"Statistics of model {i}", _text(folder / f"{name}.txt")))
    _, weights = run(compare_weights, *models, out_dir=folder)
    sections.append(("Weights", _preformatted(weights)))
    for i, model in enumerate(models, 1):
        _, counts = run(get_module_called_count, model, inputs, print_tabulate=True)
        sections.append((f"Calls of model {i}", _preformatted(counts)))
    if mode == "FvsQ":
        _, groups = run(check_unfused_operations, model1, inputs, print_tabulate=True)
        sections.append(("Unfused operations of model 1", _preformatted(groups or "None.")))
    prepared = 1 if mode == "QvsQ" else 2
    run(check_qconfig, models[prepared - 1], inputs, out_dir=folder)
    heading = f"Quantization of model {prepared}"
    sections.append((heading, _text(folder / "qconfig_info.txt")))
    content = "".join(f"<h2>{html.escape(head)}</h2>\n{body}" for head, body in sections)
    return write_text(folder, "profiler.html", page(f"Profile {mode}", content))


def _check(model1: nn.Module, model2: nn.Module, mode: str) -> None:
    if mode not in _FORMS:
        raise ValueError(f"model_profiler: mode={mode!r}: expected one of {', '.join(_FORMS)}")
    for i, (model, wanted) in enumerate(zip((model1, model2), _FORMS[mode], strict=True), 1):
        form = _form(model)
        if form != wanted:
            raise ValueError(
                f"model_profiler: mode={mode!r}: model{i} is a {form} model, expected a {wanted} "
                "one; pass neighbouring forms in the order of conversion"
            )


def _form(model: nn.Module) -> str:
    modules = list(model.modules())
    if any(isinstance(module, FixedPoint) for module in modules):
        return "converted"
    prepared = any(isinstance(module, FakeQuantizeBase) for module in modules)
    return "prepared" if prepared else "float"


def _arguments(kwargs_dict: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    given = {tool: dict((kwargs_dict or {}).get(tool, {})) for tool in _TOOLS}
    for tool, arguments in (kwargs_dict or {}).items():
        if tool not in given:
            raise ValueError(
                f"model_profiler: kwargs_dict: {tool!r}: expected one of {', '.join(_TOOLS)}"
            )
        for name in ("model", "model1", "model2", "inputs", "example_inputs"):
            if name in arguments:
                raise ValueError(
                    f"model_profiler: kwargs_dict[{tool!r}] sets {name}, which is given already"
                )
    return given


def _text(path: Path) -> str:
    return _preformatted(path.read_text(encoding="utf-8"))


def _preformatted(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>\n"
