"""Selections that a model returns, rows behind a choice, channels that one range erases."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bevquant_int8sim import compare, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

SELECTIONS = {
    "getitem": lambda y: y[:, :2],
    "select": lambda y: y[:, 0],
    "index_select": lambda y: y.index_select(1, torch.tensor([2, 0])),
    "gather": lambda y: y.gather(1, torch.zeros(1, 1, 8, 8).long()),
    "take_along_dim": lambda y: torch.take_along_dim(y, y.argmax(1, keepdim=True), 1),
    "topk": lambda y: y.topk(2, 1)[0],
}


class Selects(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.conv, self.name = nn.Conv2d(3, 4, 1), name

    def forward(self, x):
        return SELECTIONS[self.name](self.conv(x).sigmoid())


def compared(x, name):
    net = Selects(name).eval()
    quantized = quantize_model(net, example_inputs=x).model
    report = calibrate(quantized, [x])
    return compare(net, simulate(quantized, x), [x], report=report), report


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_that_is_returned_has_a_row(name):
    table, _ = compared(torch.randn(1, 3, 8, 8), name)
    last = table.rows[-1]
    assert (last.path, last.op) == ("<getitem>" if name == "topk" else f"<{name}>", last.path[1:-1])
    assert last.values == {"getitem": 128, "index_select": 128, "topk": 128}.get(name, 64)
    assert last.fake_sqnr_db is not None
    assert last.fake_sqnr_db > 20


def test_channels_that_one_range_erases_are_named():
    x = torch.randn(1, 3, 8, 8) * torch.tensor([1e-3, 1.0, 100.0])[:, None, None]
    table, report = compared(x, "getitem")
    notes = [str(finding) for finding in report.findings if finding.kind == "channels"]
    assert notes
    assert list(table.notes) == notes
    assert str(table).endswith(notes[-1])


def rows_of(features, index):
    return features.flatten(2).transpose(1, 2).take_along_dim(index[..., None], 1)


def top(score, features):
    values, index = score.flatten(1).topk(20, 1)
    return index, values, rows_of(features, index)


def sort(score, features):
    values, index = score.flatten(1).sort(1, descending=True)
    return index[:, :20], values[:, :20], rows_of(features, index[:, :20])


def argsort(score, features):
    index = score.flatten(1).argsort(1, descending=True)[:, :20]
    return index, score.flatten(1).gather(1, index), rows_of(features, index)


def largest(score, features):
    values, index = score.flatten(1).max(1)
    return index[:, None], values, rows_of(features, index[:, None])


def argmax(score, features):
    index = score.flatten(1).argmax(1, keepdim=True)
    return index, score.flatten(1).gather(1, index), rows_of(features, index)


def peaks(score, features):
    return top(score * (F.max_pool2d(score, 3, 1, 1) == score), features)


def mask(score, features):
    chosen = score[:, 0] > 0.6
    return chosen, score[:, 0][chosen], features.permute(0, 2, 3, 1)[chosen]


def places(score, features):
    near = F.max_pool2d(score, 3, 1, 1)
    peak = torch.where(score == near, score, torch.zeros_like(score))
    b, y, x = torch.where(peak[:, 0] > 0.55)
    return (b * 24 + y) * 20 + x, score[b, 0, y, x], features[b, :, y, x]


def nonzero(score, features):
    found = ((score[:, 0] > 0.6) & (score[:, 0] < 0.9)).nonzero()
    b, y, x = found.unbind(1)
    return (b * 24 + y) * 20 + x, score[b, 0, y, x], features[b, :, y, x]


CHOICES = [top, sort, argsort, largest, argmax, peaks, mask, places, nonzero]


class Chooses(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.trunk, self.score = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 1, 1)
        self.features, self.last, self.choose = nn.Conv2d(16, 4, 1), nn.Linear(4, 4), choose

    def forward(self, x):
        x = self.trunk(x).relu()
        index, scores, rows = self.choose(self.score(x).sigmoid(), self.features(x))
        return index, scores, rows, self.last(rows)


def objects(index):
    """Chosen objects of all frames: frame and place of indices by frame, place of others."""
    if index.dtype == torch.bool:
        index = index.flatten().nonzero()[:, 0]
    if index.dim() == 1:
        return set(index.tolist())
    return {(b, i) for b, row in enumerate(index.tolist()) for i in row}


@pytest.mark.parametrize("choose", CHOICES)
def test_rows_of_the_same_objects_are_compared(choose):
    torch.manual_seed(0)
    net = Chooses(choose).eval()
    x, *batches = torch.randn(5, 2, 3, 24, 20)
    for layer in (net.score, net.features):
        layer.weight.data *= 4
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x, *batches])
    integer = simulate(quantized, x)
    table = compare(net, integer, batches, verify=True)
    assert table.wrong == ()
    last = table.rows[-1]
    assert last.path == "last"
    same = own = chosen = 0
    for batch in batches:
        wanted, made = (objects(model(batch)[0]) for model in (net, integer))
        same, own, chosen = same + len(wanted & made), own + len(wanted), chosen + len(made)
    one_each = choose in (largest, argmax)  # too few for other ones
    assert same < chosen or one_each
    assert last.matched == (same, own, chosen)
    assert last.integer_sqnr_db > 20
    behind = [row for row in table.rows if row.matched and row.integer_sqnr_db is not None]
    assert min(row.integer_sqnr_db for row in behind) > 20
    assert f"{same:,} of {chosen:,} matched" in str(table)


def test_ranks_and_choices_of_the_inputs_alone_are_no_choice():
    class Ranks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(4, 4)

        def forward(self, x):
            order = x[:, 0].argsort()
            return self.last(self.first(x).topk(4, 1)[0])[order]

    torch.manual_seed(0)
    net, x = Ranks().eval(), torch.randn(50, 8)
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x])
    table = compare(net, simulate(quantized, x), [x])
    assert [row.matched for row in table.rows] == [None] * len(table.rows)
    assert table.rows[-1].integer_sqnr_db > 20


def listed(score, features):
    order = sorted(range(len(score)), key=(-score).tolist().__getitem__)[:20]
    return torch.tensor(order), features[order]


def by_numpy(score, features):
    order = np.argsort(-score.numpy())[:20].copy()
    return torch.from_numpy(order), features[order]


def one_by_one(score, features):
    chosen = score.topk(20)[1].tolist()
    return torch.tensor(chosen), torch.stack([features[i] for i in chosen])


def asked(score, features):
    chosen = [i for i in range(len(score)) if score[i] > 0.6]
    return torch.tensor(chosen), torch.stack([features[i] for i in chosen])


def suppressed(score, features):
    rest, chosen = score.argsort(descending=True)[:60], []
    while len(rest):
        chosen.append(rest[0].item())
        apart = (features[rest] - features[chosen[-1]]).norm(dim=1) > 1
        rest = rest[apart]
    return torch.tensor(chosen), features[chosen]


def nested(score, features):
    kept = (score > 0.5).nonzero()[:, 0]
    best = score[kept].topk(min(20, len(kept.tolist())))[1]
    return kept[best], features[kept][best]


class Decodes(nn.Module):
    """A decoder that a graph does not follow."""

    def __init__(self, choose):
        super().__init__()
        self.choose = choose

    def forward(self, score, features):
        float(score.numpy().max())
        return self.choose(score.flatten(), features.flatten(2)[0].T)


@torch.no_grad()
@pytest.mark.parametrize("choose", [listed, by_numpy, one_by_one, asked, suppressed, nested])
def test_choices_of_a_module_that_is_one_node_are_matched(choose):
    torch.manual_seed(0)
    net, frames = Chooses(lambda *x: x).eval(), torch.randn(6, 1, 3, 24, 20)
    for layer in (net.score, net.features):
        layer.weight *= 4
    decode = Decodes(choose)

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.decode = net, decode

        def forward(self, x):
            x = self.net.trunk(x).relu()
            return self.decode(self.net.score(x).sigmoid(), self.net.features(x))

    net = Detector().eval()
    quantized = quantize_model(net, example_inputs=frames[0]).model
    calibrate(quantized, [*frames])
    integer = simulate(quantized, frames[0])
    assert "decode" in {fallback.path for fallback in integer.float_fallbacks}
    others = 0
    for frame in frames[1:]:
        index, rows = net(frame)
        chosen, made = integer(frame)
        table = compare(net, integer, [frame], verify=True)
        assert table.wrong == ()
        last = table.rows[-1]
        assert (last.path, last.op, last.kept) == ("decode", "getitem", None)
        assert last.integer_sqnr_db > 20
        if torch.equal(index, chosen):
            continue
        others += 1
        # By rank, rows of other objects are compared.
        ranks = min(len(rows), len(made))
        gap = (rows[:ranks] - made[:ranks]).square().sum() / rows[:ranks].square().sum()
        assert last.integer_sqnr_db > 10 - 10 * float(gap.log10())
        same, own, taken = last.matched
        if choose in (suppressed, nested):  # of several choices, the one with most others
            assert 0 < same <= max(own, taken)
        else:
            same_objects = len(objects(index) & objects(chosen))
            assert (same, own, taken) == (same_objects, len(index), len(chosen))
    assert others > 1
