"""How often an exporter runs the integer model on the example."""

from __future__ import annotations

import pytest
import torch

from bevquant_export import export_sparse_onnx
from bevquant_int8sim import IntegerModel


def test_the_example_is_seen_once(nets, tmp_path, monkeypatch):
    runs = []
    walk = IntegerModel.walk

    def counted(self, inputs):
        run = {"inputs": inputs, "steps": 0, "of": len(self.steps)}
        runs.append(run)
        steps = walk(self, inputs)
        while True:
            try:
                step = next(steps)
            except StopIteration as ended:
                return ended.value
            run["steps"] += 1
            yield step

    monkeypatch.setattr(IntegerModel, "walk", counted)
    example, other = nets.frame(0), nets.frame(5)
    made = export_sparse_onnx(
        nets.encoder(), example, tmp_path / "a.onnx", batches=[tuple(example), other]
    )
    whole = [run for run in runs if run["steps"] == run["of"]]
    # Held against fake quantization, seen for its sizes, held against the file; the other frame
    # once for its voxels. What the file takes is there before the first layer has run.
    assert len(runs) == 5
    assert len(whole) == 4
    assert sum(run["inputs"] is other for run in whole) == 1
    assert torch.equal(made.returned, made.integer_model(*example))


def test_another_frame_of_the_same_sizes_is_seen(nets, tmp_path):
    few, many = nets.frame(0, share=0.05), nets.frame(0, share=0.4)
    encoder = nets.encoder()
    bounds = []
    for batches in ([], [few], [many]):
        file = export_sparse_onnx(
            encoder, few, tmp_path / "a.onnx", batches=batches, head_room=50.0
        )
        bounds.append([layer.output_bound for layer in file.layers])
    assert bounds[0] == bounds[1] != bounds[2]


@pytest.mark.parametrize("verify", [True, False])
def test_what_was_not_run_is_not_told(nets, tmp_path, verify):
    file = export_sparse_onnx(nets.encoder(), nets.frame(0), tmp_path / "a.onnx", verify=verify)
    assert (file.returned is not None) == verify
