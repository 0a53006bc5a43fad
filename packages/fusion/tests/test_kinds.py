"""What class the value of a traced node has, node by node."""

import operator

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from bevquant_fusion._kinds import KIND, kind_of
from bevquant_fusion._sparse_names import sparse_tensor_class


class TensorQuantizer(nn.Module):
    """Known by its name alone."""


class Unknown(nn.Module):
    """Of no known class."""


def made(op, target, *args, **modules):
    """A node, its first arguments placeholders or nodes, and the module it belongs to."""
    root = nn.Module()
    for name, module in modules.items():
        root.add_module(name, module)
    graph = fx.Graph()
    x = graph.placeholder("x")
    real = tuple(x if arg is fx.Node else arg for arg in args)
    return graph.create_node(op, target, real), root, x


@pytest.mark.parametrize(("name", "kind"), [("training", bool), ("weight", torch.Tensor)])
def test_attributes_are_tensors_but_for_the_mode(name, kind):
    node, root, _ = made("get_attr", name)
    assert kind_of(node, root) is kind


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Conv2d(1, 1, 1), torch.Tensor),
        (nn.ConvTranspose3d(1, 1, 1), torch.Tensor),
        (nn.BatchNorm1d(1), torch.Tensor),
        (nn.Linear(1, 1), torch.Tensor),
        (nn.ReLU(), torch.Tensor),
        (nn.AvgPool2d(2), torch.Tensor),
        (Unknown(), None),
        (nn.MaxPool2d(2, return_indices=True), None),  # makes two
    ],
)
def test_modules_of_known_classes_make_tensors(module, kind):
    node, root, _ = made("call_module", "m", fx.Node, m=module)
    assert kind_of(node, root) is kind


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.5), TensorQuantizer()])
@pytest.mark.parametrize("kind", [torch.Tensor, bool])
def test_what_hands_its_input_on_has_its_class(module, kind):
    node, root, x = made("call_module", "m", fx.Node, 5, m=module)
    assert kind_of(node, root) is None
    x.meta[KIND] = kind
    assert kind_of(node, root) is kind
    # Without an input, or with one that is no node, nothing is known.
    for args in ((), (3,)):
        node, root, _ = made("call_module", "m", *args, m=module)
        assert kind_of(node, root) is None


def test_what_is_known_from_outside_goes_first():
    node, root, _ = made("call_function", torch.relu, fx.Node)
    node.meta[KIND] = bool
    assert kind_of(node, root) is bool
    assert kind_of(made("placeholder", "y")[0], root) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("relu", torch.Tensor),
        ("dense", torch.Tensor),
        ("size", None),
        ("replace_feature", "sparse"),
    ],
)
def test_methods(name, kind):
    node, root, _ = made("call_method", name, fx.Node)
    assert kind_of(node, root) is (sparse_tensor_class() if kind == "sparse" else kind)


def replace_feature(value, features):
    """As spconv's function of that name."""


def other(value):
    """Of no package that is known."""


@pytest.mark.parametrize(
    ("function", "args", "kind"),
    [
        (torch.relu, (fx.Node,), torch.Tensor),
        (functional.relu, (fx.Node,), torch.Tensor),
        (torch.split, (fx.Node, 2), None),
        (torch.topk, (fx.Node, 2), None),
        (other, (fx.Node,), None),
        (getattr, (fx.Node, "features"), torch.Tensor),
        (getattr, (fx.Node, "indices"), None),
        (replace_feature, (fx.Node, fx.Node), "sparse"),
        (operator.add, (fx.Node, 1), None),  # of something unknown
        (operator.add, (2, 1), None),
        (operator.getitem, (fx.Node, 0), None),
    ],
)
def test_functions(function, args, kind):
    node, root, _ = made("call_function", function, *args)
    assert kind_of(node, root) is (sparse_tensor_class() if kind == "sparse" else kind)


@pytest.mark.parametrize(
    ("function", "kind", "wanted"),
    [
        (operator.add, torch.Tensor, torch.Tensor),
        (operator.imul, int, int),
        (operator.getitem, torch.Tensor, torch.Tensor),
        (operator.getitem, tuple, None),  # an element may be anything
        (other, torch.Tensor, None),
        (operator.neg, torch.Tensor, None),
    ],
)
def test_arithmetic_keeps_the_class_of_its_first_operand(function, kind, wanted):
    node, root, x = made("call_function", function, fx.Node, 1)
    x.meta[KIND] = kind
    assert kind_of(node, root) is wanted


def test_sparse_modules(spconv):
    node, root, _ = made("call_module", "m", fx.Node, m=spconv.SubMConv3d(1, 1, 3))
    assert kind_of(node, root) is sparse_tensor_class() is spconv.SparseConvTensor
    node, root, _ = made("call_module", "m", fx.Node, m=spconv.ToDense())
    assert kind_of(node, root) is None
