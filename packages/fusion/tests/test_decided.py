"""Branches by values of the frame: the fused model is right in each of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bevquant_fusion import fuse_model


class Branches(nn.Module):
    """A norm in one branch alone, a layer in both, and pairs inside of a branch."""

    def __init__(self, *, by_integer: bool, returns: bool) -> None:
        super().__init__()
        self.by_integer, self.returns = by_integer, returns
        self.stem, self.after = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.one, self.two = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.pair = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        for norm in (self.one, self.two, self.pair[1]):
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        if int(x[0, 0, 0, 0]) > 0 if self.by_integer else x.mean() > 0:
            y = self.pair(self.one(y))
            if self.returns:
                return y
        return y - self.two(self.after(x))


@torch.no_grad()
@pytest.mark.parametrize("by_integer", [True, False])
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
def test_only_layers_of_the_same_branch_are_folded(
    by_integer: bool, returns: bool, sign: int
) -> None:
    torch.manual_seed(0)
    net = Branches(by_integer=by_integer, returns=returns).double().eval()
    x = sign * (torch.rand(1, 3, 5, 5, dtype=torch.float64) + 1)
    result = fuse_model(net, x)
    for frame in (x, -x):
        torch.testing.assert_close(result.model(frame), net(frame))
    folded = {(item.conv, item.bn) for item in result.fused}
    pair, two = ("pair.0", "pair.1"), ("after", "two")
    assert folded == ({pair} if sign > 0 else set()) | (set() if returns and sign > 0 else {two})
    if sign > 0:
        reason = next(item.reason for item in result.skipped if item.bn == "one")
        assert "runs in another branch than stem" in reason
        assert "test_decided.py:" in reason


class Sizes(nn.Module):
    """A norm for even heights alone, and a pair inside of a branch."""

    def __init__(self, *, in_one_line: bool) -> None:
        super().__init__()
        self.in_one_line = in_one_line
        self.stem, self.one = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.pair = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.last, self.end = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        for norm in (self.one, self.pair[1], self.end):
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        if y.shape[0] == 0:
            return y
        if self.in_one_line:
            y = self.one(y) if y.shape[2] % 2 == 0 else y
        elif len(y[0, 0]) % 2 == 0:
            y = self.one(y)
        if y.size(3) > 4:
            y = self.pair(y)
        y = self.last(y)
        if y.numel() == 0:
            return y
        return self.end(y)


@torch.no_grad()
@pytest.mark.parametrize("in_one_line", [True, False])
def test_a_norm_that_other_sizes_do_not_run_is_kept(in_one_line: bool) -> None:
    torch.manual_seed(0)
    net = Sizes(in_one_line=in_one_line).double().eval()
    result = fuse_model(net, torch.rand(1, 3, 6, 8, dtype=torch.float64))
    folded = {(item.conv, item.bn) for item in result.fused}
    assert folded == {("pair.0", "pair.1"), ("last", "end")}
    (kept,) = result.skipped
    assert "values or sizes of the frame" in kept.reason
    for height, width in ((6, 8), (7, 8), (6, 3), (5, 3)):
        x = torch.rand(1, 3, height, width, dtype=torch.float64)
        torch.testing.assert_close(result.model(x), net(x))
