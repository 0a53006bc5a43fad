"""rebuild_forward: the module stays what it was, but for its forward."""

import copy
import pickle

import pytest
import torch
from torch import nn

from bevquant_fusion import UntraceableError, rebuild_forward, trace_forward


class Block(nn.Module):
    """Adds what it is given."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)
        self.note = "kept"

    def forward(self, x, scale=1.0):
        return self.bn(self.conv(x)) * scale + x

    def extra_repr(self):
        return self.note


@pytest.fixture
def rebuilt():
    block = Block().eval()
    rebuild_forward(block, trace_forward(block))
    return block


def test_identity_of_the_class(rebuilt):
    assert isinstance(rebuilt, Block)
    assert type(rebuilt).__name__ == "Block"
    assert type(rebuilt).__qualname__ == Block.__qualname__
    assert type(rebuilt).__module__ == Block.__module__
    assert type(rebuilt).__doc__ == Block.__doc__
    assert repr(rebuilt) == repr(Block().eval())
    assert rebuilt.state_dict().keys() == Block().state_dict().keys()
    assert "forward" not in vars(rebuilt)


def test_other_instances_keep_their_forward(rebuilt):
    assert type(Block()) is Block
    assert Block.forward is not type(rebuilt).forward


def test_copies_are_independent(rebuilt):
    for duplicate in (copy.deepcopy(rebuilt), copy.deepcopy(nn.Sequential(rebuilt))[0]):
        x = torch.randn(1, 2, 3)
        assert torch.equal(duplicate(x), rebuilt(x))
        duplicate.conv.weight.data.zero_()
        assert rebuilt.conv.weight.any()
    assert copy.copy(rebuilt).conv is rebuilt.conv


def test_state_dict_round_trip(rebuilt):
    other = Block().eval()
    rebuilt.load_state_dict(other.state_dict())
    x = torch.randn(1, 2, 3)
    assert torch.equal(rebuilt(x), other(x))


def test_gradients_hooks_and_modes(rebuilt):
    seen = []
    rebuilt.register_forward_hook(lambda *_: seen.append(1))
    rebuilt.train()(torch.randn(4, 2, 3)).sum().backward()
    assert rebuilt.conv.weight.grad is not None
    assert seen == [1]


def test_pickling_says_what_to_do(rebuilt, tmp_path):
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        pickle.dumps(rebuilt)
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        torch.save(rebuilt, tmp_path / "block.pt")
    torch.save(rebuilt.state_dict(), tmp_path / "state.pt")


def test_defaults_are_fixed(rebuilt):
    x = torch.randn(1, 2, 3)
    assert torch.equal(rebuilt(x=x, scale=1.0), rebuilt(x))
    with pytest.raises(ValueError, match="rebuilt for calls without 'scale'"):
        rebuilt(x, 2.0)
    with pytest.raises(TypeError, match="missing a required argument"):
        rebuilt()


def test_edited_graph_and_second_rebuild(rebuilt):
    x = torch.randn(1, 2, 3)
    expected = rebuilt.conv(x) + x
    graph = trace_forward(rebuilt)
    for node in list(graph.nodes):
        if node.target == "bn":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    rebuild_forward(rebuilt, graph)
    del rebuilt.bn
    assert torch.equal(rebuilt(x), expected)
    assert type(rebuilt).__mro__[1] is Block
    assert torch.equal(copy.deepcopy(rebuilt)(x), expected)


def test_the_graph_is_copied(rebuilt):
    graph = trace_forward(rebuilt)
    rebuild_forward(rebuilt, graph)
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    assert rebuilt(torch.randn(1, 2, 3)).shape == (1, 2, 3)


def test_new_children_must_exist(rebuilt):
    graph = trace_forward(rebuilt)
    node = next(n for n in graph.nodes if n.target == "bn")
    node.target = "quant_add"
    with pytest.raises(UntraceableError, match="has no 'quant_add'"):
        rebuild_forward(rebuilt, graph)
    rebuilt.quant_add = nn.Identity()
    rebuild_forward(rebuilt, graph)
    assert rebuilt(torch.randn(1, 2, 3)).shape == (1, 2, 3)


def test_tracebacks_show_the_new_source(rebuilt):
    import traceback

    try:
        rebuilt(torch.randn(1, 5, 3))
    except RuntimeError as error:
        text = "".join(traceback.format_exception(error))
    assert "conv = self.conv(x)" in text
