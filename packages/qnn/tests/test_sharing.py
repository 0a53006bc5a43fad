"""Sharing against an oracle: random graphs of convolutions and concatenations."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bevquant_qnn as qnn


class RandomGraph(nn.Module):
    """Each step reads one tensor by a convolution, or two by a concatenation and a convolution.

    A step is (first, second or None, way): the numbers are taken modulo the tensors so far, the
    way says through what the first one is read.
    """

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(
            nn.Conv2d(2 if second is None else 4, 2, 1) for _, second, _ in steps
        )
        self.identity = nn.Identity()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        tensors = [x]
        for (first, second, way), layer in zip(self.steps, self.layers, strict=True):
            a = tensors[first % len(tensors)]
            if way == "identity":
                a = self.dropout(self.identity(a))
            elif way == "view":
                a = a.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
            elif way == "relu":
                a = a.relu()
            if second is not None:
                a = torch.cat([a, tensors[second % len(tensors)]], dim=1)
            tensors.append(layer(a))
        return tensors


def _oracle(steps):
    """Return the group of each layer's input, by merging tensors until nothing changes."""
    groups = [{("tensor", 0)}]

    def merge(a, b):
        found = [group for group in groups if a in group or b in group]
        for group in found:
            groups.remove(group)
        groups.append({a, b}.union(*found))

    for index, (first, second, way) in enumerate(steps):
        source = ("tensor", first % (index + 1))
        if way == "relu":
            source = ("relu", index)
        if second is not None:
            joined = ("joined", index)
            merge(source, ("tensor", second % (index + 1)))
            merge(source, joined)
            source = joined
        merge(source, ("layer", index))
        merge(("tensor", index + 1), ("tensor", index + 1))
    return [next(i for i, g in enumerate(groups) if ("layer", k) in g) for k in range(len(steps))]


steps = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.none() | st.integers(0, 9),
        st.sampled_from(["plain", "identity", "view", "relu"]),
    ),
    min_size=2,
    max_size=7,
)


@pytest.mark.parametrize("observed", [True, False], ids=["observed", "static"])
@settings(max_examples=12, deadline=None)
@given(steps=steps)
def test_quantizers_are_one_object_exactly_where_tensors_have_one_range(observed, steps):
    model, x = RandomGraph(steps).eval(), torch.randn(1, 2, 3, 3)
    reference = model(x)
    result = qnn.quantize_model(model, example_inputs=x if observed else None, inplace=True)
    groups = _oracle(steps)
    readers = [layer._input_quantizer for layer in model.layers]
    for a, b in combinations(range(len(steps)), 2):
        assert (readers[a] is readers[b]) == (groups[a] == groups[b]), (a, b)
    assert sum(m.kind == "QuantConcat" for m in result.quantized) == sum(
        second is not None for _, second, _ in steps
    )
    assert len(model(x)) == len(reference)
