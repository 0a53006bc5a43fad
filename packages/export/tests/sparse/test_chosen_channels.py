"""Channels of voxels that a forward takes apart: slices, chunks, shuffles, groups."""

import collections

import pytest
import torch
from torch import nn

from bevquant_export import (
    compare_sparse_onnx,
    export_sparse_onnx,
    lint_onnx,
    load_sparse_onnx,
    lower_to_portable,
)

WAYS = {
    "slices": lambda x: (x[:, :8], x[:, 8:]),
    "steps": lambda x: (x[:, ::2], x[:, 1::2]),
    "chunk": lambda x: x.chunk(2, 1),
    "split": lambda x: torch.split(x, 8, dim=1),
    "sizes": lambda x: x.split([8, 8], dim=-1),
    "narrow": lambda x: (x.narrow(1, 0, 8), x.narrow(1, 8, 8)),
    "tensor_split": lambda x: torch.tensor_split(x, 2, dim=1),
    "unbind": lambda x: x.view(x.shape[0], 2, 8).unbind(1),
    "flipped": lambda x: x.flip(1).chunk(2, 1),
    "repeated": lambda x: (x, x.repeat(1, 2)[:, 12:20]),
    "index": lambda x: (x[:, torch.arange(8)], x.index_select(1, torch.arange(8, 16))),
}


def halves(nets, take, **conv):
    """Two halves of a layer's channels, each with a layer of its own, side by side again."""
    spconv = nets.spconv

    def layer(ins, outs, **about):
        made = spconv.SubMConv3d(ins, outs, 3, padding=1, **about)
        return spconv.SparseSequential(made, nn.ReLU())

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            kind = spconv.SparseConv3d if conv else spconv.SubMConv3d
            self.stem = spconv.SparseSequential(kind(5, 16, 3, padding=1, **conv), nn.ReLU())
            self.one = layer(8, 8, indice_key="own")
            self.other = layer(8, 8, indice_key="own")
            self.last = layer(16, 8, indice_key="own")

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            a, b = take(x.features)
            a, b = self.one(x.replace_feature(a)), self.other(x.replace_feature(b))
            return self.last(x.replace_feature(torch.cat([a.features, b.features], 1)))

    torch.manual_seed(0)
    return nets.calibrated(Halves().eval(), [nets.frame(0), nets.frame(1)])


def same_in_both(nets, model, folder, **given):
    """The graphs of both files, which compute on another frame what the model does."""
    pytest.importorskip("onnxruntime")
    graphs = {}
    for dialect in ("libspconv", "portable"):
        path = folder / f"{dialect}.onnx"
        export_sparse_onnx(model, nets.frame(0), path, dialect=dialect, **given)
        backends = ("auto", "onnxruntime") if dialect == "portable" else ("auto",)
        for file in [load_sparse_onnx(path, backend=backend) for backend in backends]:
            rows = compare_sparse_onnx(file, model, nets.frame(2))
            assert [row.node for row in rows if row.different] == []
            assert len(rows) > 2
        graphs[dialect] = file.graph
    lowered = lower_to_portable(folder / "libspconv.onnx", folder / "lowered.onnx")
    rows = compare_sparse_onnx(load_sparse_onnx(lowered.path), model, nets.frame(2))
    assert [row.node for row in rows if row.different] == []
    findings = lint_onnx(folder / "libspconv.onnx", "libspconv")
    assert [f for f in findings if f.severity == "error"] == []
    return graphs


def count(graph):
    return collections.Counter(node.kind for node in graph.nodes)


def parts_of(graph, layer):
    return [node for node in graph.nodes if node.kind == "conv" and layer in node.path]


def test_parts_of_a_layer(nets, tmp_path):
    graphs = same_in_both(nets, halves(nets, WAYS["chunk"]), tmp_path)
    assert count(graphs["portable"])["select"] == 2
    # For the engine the layer itself is written in two parts: no work more, and a range for each.
    parts = parts_of(graphs["libspconv"], "stem")
    assert [(node.in_channels, node.out_channels) for node in parts] == [(5, 8), (5, 8)]


def test_parts_of_a_strided_layer_share_its_voxels(nets, tmp_path):
    model = halves(nets, WAYS["chunk"], stride=2)
    graph = same_in_both(nets, model, tmp_path)["libspconv"]
    first, second = parts_of(graph, "stem")
    assert first.rulebook == second.rulebook
    assert first.rulebook != ""


def test_every_way_to_take_channels(nets, tmp_path):
    spconv = nets.spconv

    class Ways(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = spconv.SubMConv3d(5, 16, 3, padding=1)
            self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in WAYS)

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            pairs = zip(WAYS.values(), self.heads, strict=True)
            return [head(take(x.features)[1]) for take, head in pairs]

    model = nets.calibrated(Ways().eval(), [nets.frame(0)])
    made = export_sparse_onnx(model, nets.frame(0), tmp_path / "p.onnx", dialect="portable")
    file = load_sparse_onnx(made.path)
    rows = compare_sparse_onnx(file, model, nets.frame(2))
    assert [row.node for row in rows if row.different] == []
    halves = [node.channels for node in file.graph.nodes if node.kind == "select"]
    flipped, again = [*range(7, -1, -1)], [12, 13, 14, 15, 0, 1, 2, 3]
    expected = [[*range(1, 16, 2)], flipped, [*range(8, 16)], again]
    assert sorted(map(list, halves)) == expected


def test_a_part_beside_the_whole(nets, tmp_path):
    """The whole is read too, in a range of its own."""
    spconv = nets.spconv

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = spconv.SubMConv3d(5, 16, 3, padding=1)
            self.whole = spconv.SubMConv3d(16, 8, 3, padding=1)
            self.part = spconv.SubMConv3d(8, 8, 3, padding=1)
            with torch.no_grad():
                self.stem.weight[:8] *= 0.1

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            part = self.part(x.replace_feature(x.features[:, :8].relu()))
            return self.whole(x), part

    model = nets.calibrated(Beside().eval(), [nets.frame(0)])
    graphs = same_in_both(nets, model, tmp_path)
    (select,) = [node for node in graphs["portable"].nodes if node.kind == "select"]
    assert select.activation == "ReLU"
    whole, part = parts_of(graphs["libspconv"], "stem")
    assert (whole.out_channels, part.out_channels) == (16, 8)
    assert whole.output_precision == part.output_precision == "int8"


def test_groups_that_are_shuffled(nets, tmp_path):
    spconv = nets.spconv

    class Shuffled(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = spconv.SubMConv3d(5, 16, 3, padding=1)
            sizes = [(3, 3, 3), (1, 3, 3), (3, 1, 3), (3, 3, 1)]
            self.groups = nn.ModuleList(
                spconv.SubMConv3d(4, 4, size, padding=tuple(n // 2 for n in size)) for size in sizes
            )
            self.last = spconv.SubMConv3d(24, 8, 3, padding=1)

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            parts = x.features.split(4, 1)
            parts = [
                g(x.replace_feature(p)).features for g, p in zip(self.groups, parts, strict=True)
            ]
            y = torch.cat(parts, 1)
            y = y.view(y.shape[0], 4, 4).transpose(1, 2).reshape(y.shape[0], -1)
            summed = y.view(y.shape[0], 2, 8).sum(1)
            return self.last(x.replace_feature(torch.cat([y, summed], 1)))

    torch.manual_seed(0)
    model = nets.calibrated(Shuffled().eval(), [nets.frame(0)])
    graphs = same_in_both(nets, model, tmp_path)
    assert count(graphs["portable"])["fold"] == 1
    assert count(graphs["libspconv"])["select"] == 0


def test_channels_of_the_input(nets, tmp_path):
    spconv = nets.spconv

    class Skipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = spconv.SubMConv3d(3, 8, 3, padding=1)
            self.last = spconv.SubMConv3d(10, 8, 3, padding=1)

        def forward(self, features, coords, batch_size):
            x = spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size)
            y = self.stem(x.replace_feature(x.features[:, :3]))
            return self.last(y.replace_feature(torch.cat([y.features, x.features[:, 3:]], 1)))

    torch.manual_seed(0)
    model = nets.calibrated(Skipped().eval(), [nets.frame(0)])
    graphs = same_in_both(nets, model, tmp_path)
    assert graphs["portable"].channels == graphs["libspconv"].channels == 5


def test_parts_of_a_sum_with_ranges_of_their_own(nets, tmp_path):
    spconv = nets.spconv

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = spconv.SubMConv3d(5, 16, 3, padding=1)
            self.more = spconv.SubMConv3d(16, 16, 3, padding=1)
            self.one = spconv.SubMConv3d(8, 8, 3, padding=1)
            self.other = spconv.SubMConv3d(8, 8, 3, padding=1)

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            y = x.replace_feature(torch.relu(self.more(x).features + x.features))
            a, b = y.features.chunk(2, 1)
            return self.one(y.replace_feature(a)), self.other(y.replace_feature(b))

    torch.manual_seed(0)
    model = nets.calibrated(Summed().eval(), [nets.frame(0)])
    graphs = same_in_both(nets, model, tmp_path)
    assert count(graphs["portable"])["add"] == 2  # rounded to each range by itself


NO_CHANNELS = {  # the operator that is refused, and how many columns there are
    "flip": ("flip", 8, lambda x: x.flip(0)),
    "roll": ("roll", 8, lambda x: x.roll(1)),
    "pad": ("pad", 9, lambda x: nn.functional.pad(x, (0, 1))),
    "rows": ("getitem", 8, lambda x: x[:5]),
    "values": ("getitem", 2, lambda x: x.reshape(-1)[: len(x) * 2].view(-1, 2)),
    "as many as rows": ("getitem", 8, lambda x: x[:, : x.shape[0]]),
}


@pytest.mark.parametrize(("refused", "width", "move"), NO_CHANNELS.values(), ids=NO_CHANNELS)
def test_other_moves_are_no_choice_of_channels(nets, tmp_path, refused, width, move):
    """A choice of voxels looks like one of channels: libspconv is refused it, with its line."""
    spconv = nets.spconv

    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = spconv.SubMConv3d(5, 8, 3, padding=1)
            self.last = nn.Linear(width, 4)

        def forward(self, features, coords, batch_size):
            x = self.stem(spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size))
            return self.last(move(x.features))

    model = nets.calibrated(Moved().eval(), [nets.frame(0)])
    with pytest.raises(ValueError, match=rf"{refused} .*_channels\.py:\d+\) has no operator"):
        export_sparse_onnx(model, nets.frame(0), tmp_path / "x.onnx")
