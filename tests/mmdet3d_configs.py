"""The configurations of mmdetection3d's wheel through the whole path: a table of the documentation.

    python tests/mmdet3d_configs.py                 # what is not yet in the table
    python tests/mmdet3d_configs.py centerpoint     # configurations whose name has this
    python tests/mmdet3d_configs.py --list          # kinds of model, and their configurations

One configuration of each kind of model is folded, quantized with two frames, run in integers
on a third one and written as files. Its grid of voxels, points and images are cut down first.
Others of the kind differ in sizes, data set or schedule, or in the dense backbone and neck of a
LiDAR model (SECOND or RegNet, SECONDFPN or FPN). Results go to the table of
docs/howto/from_mmdetection3d.md. Weights are random. It needs mmdet3d 1.4.0, mmdet 3.3.0, mmengine
0.10.7 and mmcv-lite 2.1.0, see that page.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bev_data import InputError
from bev_scenes import street_frame
from bevfusion.frameworks import ForeignModel, use_operator_standins
from bevfusion.frameworks._mmdet3d import SECOND_STAGE, load_mmdet3d
from bevfusion.model import random_weights
from bevfusion.quantization import calibrate_detector, fuse_detector, quantize_detector
from bevquant_export import export_detector
from bevquant_int8sim import simulate

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "from_mmdetection3d.md"
HEAD = "| configuration | result | int8 | worst output | seconds |\n|---|---|---|---|---|\n"


COUNTS = ("num_points", "num_point", "num_proposal", "num_keypoints", "fps_sample_range_lists")
"""Of points, in models and their samplers."""

PLAIN = {ord("|"): "/", ord("`"): None}
DENSE = ("SECOND", "NoStemRegNet", "SECONDFPN", "mmdet.FPN")
"""Backbones and necks that do not make a kind of their own."""


def configs() -> Iterator[str]:
    """Names of the wheel's configurations."""
    import mmdet3d

    root = Path(mmdet3d.__file__).parent / ".mim" / "configs"
    names = (path.relative_to(root).as_posix() for path in sorted(root.glob("*/*.py")))
    return (name for name in names if not name.startswith("_base_"))


def settings_of(name: str) -> Any:
    """The configuration, or the error of reading it as text."""
    import mmdet3d
    from mmengine.config import Config

    try:
        return Config.fromfile(Path(mmdet3d.__file__).parent / ".mim" / "configs" / name)
    except FileNotFoundError as error:
        return f"mmdetection3d cannot read it: no {Path(str(error.filename)).name}"


def kind_of(settings: Any) -> str:
    """The classes that a model is made of, without sizes."""
    if isinstance(settings, str):
        return settings
    model = settings.model
    parts = ("voxel_encoder", "middle_encoder", "backbone", "neck", "bbox_head", "roi_head")
    names = [str(model["type"])]
    for part in (*parts, "rpn_head", "decode_head", "img_backbone", "bbox_head_3d", "neck_3d"):
        found = model.get(f"pts_{part}") or model.get(part)
        if isinstance(found, Mapping) and found["type"] not in DENSE:
            names.append(str(found["type"]))
    for key in ("dcn", "dcn_config"):
        if f"'{key}'" in str(model.to_dict()) and f"'{key}': None" not in str(model.to_dict()):
            names.append("deformable")
    if str(model.to_dict()).find("sparseconv_backend") >= 0:
        names.append(model.backbone.get("sparseconv_backend", "torchsparse"))
    return " ".join(names)


def cut_down(settings: Any) -> None:
    """A sixteenth of the grid, an eighth of the points, small images: seconds of minutes."""
    model = settings.model
    layer = model.get("data_preprocessor", {}).get("voxel_layer")
    if layer is not None and "voxel_size" in layer and max(layer.voxel_size) < 1e3:
        low, high = layer.point_cloud_range[:3], layer.point_cloud_range[3:]
        cells = [round((b - a) / s) for a, b, s in zip(low, high, layer.voxel_size, strict=True)]
        small = [math.ceil(count / 64) * 16 for count in cells[:2]]
        old, new = list(layer.point_cloud_range), list(layer.point_cloud_range)
        for axis in (0, 1):
            length = small[axis] * layer.voxel_size[axis]
            new[axis] = 0.0 if low[axis] == 0 else -length / 2
            new[axis + 3] = new[axis] + length
        _replace(settings.model, old, new)
        for part in ("middle_encoder", "pts_middle_encoder"):
            for key in ("sparse_shape", "output_shape"):
                if key in model.get(part, {}):
                    model[part][key] = [*model[part][key][:-2], *small[::-1]]
        _replace(settings.model, cells[:2], small)
    if "n_voxels" in model:
        model["n_voxels"] = [n // 32 * 8 if n > 100 else n for n in model["n_voxels"]]
    if "neck_3d" in model and "voxel_size" in model:
        model["voxel_size"] = [4 * size for size in model["voxel_size"][:2]] + [0.5]
    _smaller_points(settings.model)
    for step in settings.get("test_pipeline", ()):
        _smaller_step(step)


def _replace(found: Any, old: list[Any], new: list[Any]) -> None:
    items = found.items() if isinstance(found, Mapping) else enumerate(found)
    for key, value in list(items):
        if isinstance(value, list | tuple) and list(value)[: len(old)] == old:
            found[key] = [*new, *list(value)[len(old) :]]
        elif isinstance(value, Mapping | list):
            _replace(value, old, new)


def _smaller_points(found: Any) -> None:
    for key, value in found.items() if isinstance(found, Mapping) else enumerate(found):
        if key in COUNTS:
            found[key] = _eighth(value)
        elif isinstance(value, Mapping | list):
            _smaller_points(value)


def _eighth(number: Any) -> Any:
    if isinstance(number, int):
        return max(1, number // 8) if number > 0 else number
    return tuple(map(_eighth, number))


def _smaller_step(step: Any) -> None:
    for inner in step.get("transforms", ()):
        _smaller_step(inner)
    if step["type"] == "PointSample":
        step["num_points"] //= 8
    for key in ("scale", "img_scale"):
        if isinstance(step.get(key), tuple | list):
            step[key] = tuple(max(32, n // 4 // 32 * 32) for n in step[key])


def decibels(wanted: Any, found: Any) -> float:
    """The lowest signal-to-noise ratio of an output."""
    ratios = []
    for a, b in zip(maps_of(wanted), maps_of(found), strict=True):
        signal, noise = a.double().square().sum(), (a - b).double().square().sum()
        if signal > 0:
            ratios.append(10 * float(torch.log10(signal / noise.clamp(min=1e-30))))
    return min(ratios)


def maps_of(outputs: Any) -> list[torch.Tensor]:
    """Tensors of floats, also of sparse tensors."""
    leaves = [getattr(leaf, "features", leaf) for leaf in tree_leaves(outputs)]
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def take(name: str) -> str:
    """A configuration through the path of `ptq`, as cells of the table."""
    start = time.process_time()
    detector = load_mmdet3d(name, edit=cut_down)
    network = ForeignModel(detector)
    frames = [street_frame(seed, size="nuscenes", cameras="tiny", sweeps=1) for seed in range(3)]
    example, second, other = map(network.arguments, frames)
    random_weights(network, *example)
    for path, module in network.named_modules():
        if path.endswith("conv_offset"):  # trained offsets are small
            module.weight.detach().mul_(0.05)
            module.bias.detach().zero_()
    fused = fuse_detector(network, example).model
    quantized = quantize_detector(fused, example, network.parts, first_layer=False).model
    calibrate_detector(quantized, [example, second], method="mse")
    model = simulate(quantized, example)
    with torch.no_grad():
        wanted = fused(*other)
    integers = model(*other)
    worst = decibels(wanted, integers)
    result = []
    if network.finds_boxes:
        network.boxes(wanted, lambda: frames[2])
        network.boxes(integers, lambda: frames[2])
        result.append("boxes")
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = export_detector(quantized.network, example, folder, batches=[other])
            result += [f.path.name for f in (made.sparse, made.dense) if f is not None]
        except ValueError as error:
            reason = re.sub(r" \([^()]*\)", "", short(error)).partition(" (")[0]
            result.append(f"no files: {reason}")
    result += ["second stage in float" for note in detector.notes if note == SECOND_STAGE]
    seconds = time.process_time() - start
    text = ", ".join(result)
    return f"{text} | {model.integer_share:.0%} | {worst:.1f} dB | {seconds:.0f} |"


def short(error: Exception) -> str:
    """The reason in an error, as a cell: without paths of this machine and remedies."""
    text = re.sub(r"(?<=['( ])/\S*/", "", str(error).partition("\n")[0])
    return re.split(r"; |\. ", text)[0].translate(PLAIN)


def attempt(name: str) -> str:
    """The cells of a configuration, or the reason why it has none."""
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return take(name)
    except (InputError, ValueError) as error:
        return f"no: {short(error).removeprefix(f'mmdet3d:{name}: ')} | | | |"


def read_table() -> dict[str, str]:
    """Cells by configuration, from the page, which ends with the table."""
    _, _, after = PAGE.read_text(encoding="utf-8").partition(HEAD)
    rows = (line.removeprefix("| `").split("` | ", 1) for line in after.splitlines())
    return {name: cells for name, cells in rows}


def write_table(cells: Mapping[str, str]) -> None:
    """The page with these rows."""
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEAD)
    rows = "".join(f"| `{name}` | {cells[name]}\n" for name in sorted(cells))
    PAGE.write_text(f"{before}{HEAD}{rows}", encoding="utf-8")


def kinds() -> dict[str, list[str]]:
    """Configurations by kind of model."""
    made: dict[str, list[str]] = {}
    for name in configs():
        made.setdefault(kind_of(settings_of(name)), []).append(name)
    return made


def main(wanted: Sequence[str]) -> None:
    """Run what is asked for, and write the table after each run."""
    use_operator_standins()
    grouped = kinds()
    if "--list" in wanted:
        for kind, names in grouped.items():
            print(kind, *names, sep="\n    ")
        return
    for first, *others in grouped.values():
        asked = any(word in first for word in wanted) if wanted else first not in read_table()
        if not asked:
            continue
        print(first, flush=True)
        cells = attempt(first)
        print(f"  {cells}", flush=True)
        same = cells if cells.startswith("no: ") else f"as `{first}` | | | |"
        write_table({**read_table(), first: cells, **dict.fromkeys(others, same)})


if __name__ == "__main__":
    main(sys.argv[1:])
