"""mit-bevfusion state dicts: layouts, wrappers, and everything that can be wrong with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bev_data import InputError
from bevfusion.model import (
    CONFIGS,
    build_lidar_branch,
    load_state_dict,
    load_weights,
    read_state_dict,
)

TINY = CONFIGS["tiny"].lidar
CONV = "encoders.lidar.backbone.conv_input.0.weight"
TO = {"RSCK": (1, 2, 3, 4, 0), "KRSC": (0, 1, 2, 3, 4), "KCRS": (0, 4, 1, 2, 3)}


def stored(layout: str, config=TINY) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random parameters of a branch in spconv 2's layout, and the same as a file holds them."""
    generator = torch.Generator().manual_seed(0)
    own = {
        name: t if not t.is_floating_point() else torch.rand(t.shape, generator=generator)
        for name, t in build_lidar_branch(config).state_dict().items()
    }
    file = {n: t.permute(TO[layout]).contiguous() if t.ndim == 5 else t for n, t in own.items()}
    return own, file


def same(model: torch.nn.Module, wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(t, wanted[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("layout", TO)
@pytest.mark.parametrize("said", [True, False])
def test_every_layout_loads(layout: str, said: bool) -> None:
    own, file = stored(layout)
    model = build_lidar_branch(TINY)
    report = load_state_dict(model, file, layout=layout if said else "auto")
    assert report.layout == layout
    assert same(model, own)


def test_wrapped_pth_with_other_branches(tmp_path: Path) -> None:
    own, file = stored("RSCK")
    others = {"encoders.camera.backbone.x": torch.ones(2), "heads.object.y": torch.ones(3)}
    path = tmp_path / "epoch.pth"
    wrapped = {f"module.{n}": t for n, t in {**file, **others}.items()}
    torch.save({"state_dict": wrapped, "meta": {"epoch": 3}}, path)
    model = build_lidar_branch(TINY)
    report = load_weights(model, path)
    assert same(model, own)
    assert report.not_used == ("encoders.camera.backbone.x", "heads.object.y")
    assert set(report.loaded) == set(file)


def test_half_precision_safetensors_without_batch_counts(tmp_path: Path) -> None:
    own, file = stored("RSCK")
    path = tmp_path / "w.safetensors"
    save_file({n: t.half() for n, t in file.items() if "num_batches" not in n}, path)
    model = build_lidar_branch(TINY)
    load_weights(model, path)
    got = model.state_dict()[CONV]
    assert got.dtype == torch.float32
    assert torch.equal(got, own[CONV].half().float())


def test_all_wrong_entries_are_listed_at_once_and_nothing_is_loaded() -> None:
    _, file = stored("RSCK")
    before = {n: t.clone() for n, t in build_lidar_branch(TINY).state_dict().items()}
    del file["encoders.lidar.backbone.conv_out.1.bias"]
    del file["encoders.lidar.backbone.encoder_layers.encoder_layer2.0.conv1.weight"]
    file["encoders.lidar.backbone.extra"] = torch.ones(1)
    file[CONV] = torch.ones(3, 3, 3, 4, 8)
    file["encoders.lidar.backbone.conv_input.1.bias"] = torch.ones(9)
    file["encoders.lidar.backbone.conv_input.1.weight"][2] = float("nan")
    model = build_lidar_branch(TINY)
    model.load_state_dict(before)
    with pytest.raises(InputError) as caught:
        load_state_dict(model, file)
    message = str(caught.value)
    assert "missing: encoders.lidar.backbone.conv_out.1.bias" in message
    assert "missing: encoders.lidar.backbone.encoder_layers.encoder_layer2.0.conv1.wei" in message
    assert "unexpected: encoders.lidar.backbone.extra" in message
    assert f"misshapen: {CONV} should be [3, 3, 3, 5, 8] (RSCK), is [3, 3, 3, 4, 8]" in message
    assert "misshapen: encoders.lidar.backbone.conv_input.1.bias should be [8], is [9]" in message
    assert "not finite: encoders.lidar.backbone.conv_input.1.weight" in message
    assert "6 problems" in message
    assert same(model, before)


def test_trap_06_layout_that_shapes_leave_open_is_asked_for() -> None:
    threes = dataclasses.replace(
        TINY,
        in_channels=3,
        base_channels=3,
        encoder_channels=((3, 3, 4), (4, 4, 4), (4, 4, 4), (4, 4)),
    )
    own, file = stored("RSCK", threes)
    model = build_lidar_branch(threes)
    with pytest.raises(InputError, match=r"fits more than one.*--weight-layout"):
        load_state_dict(model, file)
    load_state_dict(model, file, layout="RSCK")
    assert same(model, own)


def test_mixed_layouts_are_refused() -> None:
    _, file = stored("RSCK")
    file[CONV] = file[CONV].permute(4, 0, 1, 2, 3).contiguous()
    with pytest.raises(InputError, match="do not agree on one layout"):
        load_state_dict(build_lidar_branch(TINY), file)


def test_declared_layout_is_believed_not_the_shapes() -> None:
    _, file = stored("KRSC")
    with pytest.raises(InputError, match=r"misshapen.*\(RSCK\)"):
        load_state_dict(build_lidar_branch(TINY), file, layout="RSCK")


def test_unknown_layout() -> None:
    with pytest.raises(InputError, match="unknown: use one of auto, RSCK"):
        load_state_dict(build_lidar_branch(TINY), {}, layout="HWIO")


def test_foreign_state_dict_says_so() -> None:
    with pytest.raises(InputError, match=r"no checkpoint of such a model.*fc\.weight"):
        load_state_dict(build_lidar_branch(TINY), {"fc.weight": torch.ones(2)})


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def test_damaged_missing_and_pickled_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no weights file at"):
        read_state_dict("absent.pth")
    torch.save({"a": torch.ones(2000)}, "cut.pth")
    Path("cut.pth").write_bytes(Path("cut.pth").read_bytes()[:700])
    Path("cut.safetensors").write_bytes(b"\x10\0\0\0")
    torch.save({"state_dict": Payload()}, "pickled.pth")
    Path("empty.pth").touch()
    for name in ("cut.pth", "cut.safetensors", "pickled.pth", "empty.pth"):
        with pytest.raises(InputError, match=r"(cannot be read as|is not) a state dict"):
            read_state_dict(name)
    assert not Path("executed").exists()
    torch.save([torch.ones(1)], "list.pth")
    with pytest.raises(InputError, match="holds list where a state dict"):
        read_state_dict("list.pth")
    torch.save({"epoch": 3, "w": torch.ones(1)}, "mixed.pth")
    assert list(read_state_dict("mixed.pth")) == ["w"]
