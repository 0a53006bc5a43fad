"""Parts of a model whose forward as a whole cannot be followed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bevquant_fusion import fuse_parts


def block(channels: int, made: int) -> nn.Sequential:
    norm = nn.BatchNorm2d(made)
    nn.init.uniform_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return nn.Sequential(nn.Conv2d(channels, made, 3), norm, nn.ReLU())


class Stages(nn.Module):
    """Between its parts Python decides by a value, which no tracer follows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(2, 4)
        self.left, self.right = block(4, 3), block(4, 3)
        self.idle = block(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.left(x) if float(x.detach().sum()) > 1e9 else self.right(x)


def test_each_part_is_folded_and_told_by_its_full_path() -> None:
    torch.manual_seed(0)
    net, x = Stages().double().eval(), torch.randn(2, 2, 9, 9, dtype=torch.float64)
    wanted = net(x)
    result = fuse_parts(net, (x,), ["stem", "right", "left", "not there"], unchecked=["right"])
    assert [(item.conv, item.bn) for item in result.fused] == [
        ("stem.0", "stem.1"), ("right.0", "right.1"),
    ]  # fmt: skip
    assert result.max_error is not None
    assert result.max_error < 1e-10
    torch.testing.assert_close(result.model(x), wanted)
    assert isinstance(result.model.stem[1], nn.Identity)
    assert isinstance(net.stem[1], nn.BatchNorm2d)
    assert not net.stem._forward_hooks
    assert not result.model.stem._forward_hooks


class Frozen(nn.Module):
    """A batch norm as arithmetic on its buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


class Overwrites(nn.Module):
    """Writes to what its part was called with, as in-place activations behind a part do."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.stem = block(2, 4)
        if frozen:
            self.stem[1] = Frozen(4)

    def forward(self, x: Tensor) -> Tensor:
        kept = x * 3
        y = self.stem(kept)
        kept.zero_()
        return y


@pytest.mark.parametrize("frozen", [False, True])
def test_a_part_whose_input_is_overwritten_is_compared_on_what_it_holds_then(frozen: bool) -> None:
    torch.manual_seed(0)
    net, x = Overwrites(frozen).double().eval(), torch.randn(2, 2, 9, 9, dtype=torch.float64)
    result = fuse_parts(net, (x,), ["stem"])
    assert [(item.conv, item.bn) for item in result.fused] == [("stem.0", "stem.1")]
    assert result.max_error is not None
    assert result.max_error < 1e-10
    torch.testing.assert_close(result.model(x), net(x))


def test_parts_that_never_run_are_refused() -> None:
    with pytest.raises(ValueError, match="runs none of idle"):
        fuse_parts(Stages().eval(), (torch.randn(1, 2, 9, 9),), ["idle"])
