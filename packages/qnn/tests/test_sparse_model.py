"""A whole sparse encoder: its printed tree, its shared quantizers, and training on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bevquant_qnn as qnn
from bevquant_sparse import use_bevquant_kernels

# spconv 2.3.8's own dense() indexes with a list.
pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")

ACTIVATION = (
    "(_input_quantizer): TensorQuantizer(8bit fake per-tensor amax=dynamic "
    "calibrator=HistogramCalibrator scale=1.0 quant)"
)
WEIGHT = (
    "(_weight_quantizer): TensorQuantizer(8bit fake axis=0 amax=dynamic "
    "calibrator=MaxCalibrator scale=1.0 quant)"
)


def _expected_tree():
    """The listing of a quantized, fused SparseEncoder, with spconv 2's weight axis."""
    conv = ["QuantSparseConvolution", [ACTIVATION], [WEIGHT]]
    chain = ["SparseSequential", ["(0): ", *conv], ["(1): ReLU()"]]
    block = [
        "SparseBasicBlock",
        ["(conv1): ", *conv],
        ["(conv2): ", *conv],
        ["(relu): ReLU()"],
        ["(quant_add): ", "QuantAdd", [ACTIVATION]],
    ]
    stages = []
    for i in range(1, 5):
        members = [["(0): ", *block], ["(1): ", *block]]
        if i < 4:
            members.append(["(2): ", *chain])
        stages.append([f"(encoder_layer{i}): ", "SparseSequential", *members])
    tree = [
        "SparseEncoder",
        ["(conv_input): ", *chain],
        ["(encoder_layers): ", "SparseSequential", *stages],
        ["(conv_out): ", *chain],
    ]
    return list(_lines("", tree, 0))


def _lines(head, tree, depth):
    name = tree[0]
    children = tree[1:]
    if children and isinstance(children[0], str):
        name, children = name + children[0], children[1:]
    if not children:
        yield " " * depth + head + name
        return
    yield " " * depth + head + name + "("
    for child in children:
        yield from _lines("", child, depth + 2)
    yield " " * depth + ")"


@pytest.fixture
def scene():
    generator = torch.Generator().manual_seed(1)
    coordinates = (torch.rand(2, 16, 16, 17, generator=generator) < 0.08).nonzero().int()
    return torch.randn(len(coordinates), 5, generator=generator), coordinates, 2


@pytest.fixture
def encoder(sparse_nets):
    model = sparse_nets.SparseEncoder()
    use_bevquant_kernels(model)
    return model.eval()


def test_tree_is_the_listing(encoder, scene):
    qnn.quantize_model(encoder, example_inputs=scene, inplace=True)
    assert repr(encoder).splitlines() == _expected_tree()


@pytest.mark.parametrize("observed", [True, False], ids=["observed", "static"])
def test_block_input_identity_and_sum_share_one_quantizer(encoder, scene, observed):
    reference = encoder(*scene)
    result = qnn.quantize_model(encoder, example_inputs=scene if observed else None, inplace=True)
    blocks = [layer[i] for layer in encoder.encoder_layers for i in (0, 1)]
    for block in blocks:
        assert block.conv1._input_quantizer is block.quant_add._input_quantizer
        assert block.conv2._input_quantizer is not block.conv1._input_quantizer
    assert len({id(block.quant_add._input_quantizer) for block in blocks}) == 8
    assert len(result.shared) == 8
    assert result.skipped == ()
    assert (encoder(*scene) - reference).norm() < 0.05 * reference.norm()


def test_trap_19_sparse_convolutions_that_fx_cannot_trace_are_quantized(encoder, scene):
    assert sum("Conv3d" in type(m).__name__ for m in encoder.modules()) == 21
    result = qnn.quantize_model(encoder)
    kinds = [item.kind for item in result.quantized]
    assert kinds.count("QuantSparseConvolution") == 21
    assert kinds.count("QuantAdd") == 8


def test_trap_16_residual_does_not_see_the_quantization_of_conv1(encoder, scene):
    """With conv1's quantizer off and the sum's on, both read the block's own input."""
    qnn.quantize_model(encoder, example_inputs=scene, inplace=True)
    block = encoder.encoder_layers[0][0]
    seen = {}
    block.conv1.register_forward_pre_hook(lambda _, args: seen.update(conv=args[0].features))
    block.quant_add.register_forward_pre_hook(lambda _, args: seen.update(add=args))
    encoder(*scene)
    identity = seen["add"][1]
    assert identity is seen["conv"]
    assert not torch.equal(block.conv1._input_quantizer(identity), identity)


def test_trap_15_sparse_quantization_aware_training_learns(encoder, scene):
    optimizer = torch.optim.Adam(encoder.parameters(), 0.01)
    parameters = {id(p) for p in encoder.parameters()}
    qnn.quantize_model(encoder, example_inputs=scene, inplace=True)
    assert {id(p) for p in encoder.parameters()} == parameters
    encoder.train()
    goal = torch.randn_like(encoder(*scene))
    before = [p.detach().clone() for p in encoder.parameters()]
    losses = []
    for _ in range(6):
        loss = (encoder(*scene) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.995 * losses[0]
    assert not any(map(torch.equal, before, encoder.parameters()))


def test_deepcopy_and_state_dict(encoder, scene, sparse_nets):
    qnn.quantize_model(encoder, example_inputs=scene, inplace=True)
    twin = copy.deepcopy(encoder)
    block = twin.encoder_layers[0][0]
    assert block.conv1._input_quantizer is block.quant_add._input_quantizer
    assert block.conv1._input_quantizer is not encoder.encoder_layers[0][0].conv1._input_quantizer
    fresh = sparse_nets.SparseEncoder().eval()
    qnn.quantize_model(fresh, inplace=True)
    fresh.load_state_dict(encoder.state_dict())
    for other in (twin, fresh):
        assert torch.equal(other(*scene), encoder(*scene))


def test_quantizing_twice_changes_nothing(encoder, scene):
    qnn.quantize_model(encoder, example_inputs=scene, inplace=True)
    tree = repr(encoder)
    assert qnn.quantize_model(encoder, example_inputs=scene, inplace=True).quantized == ()
    assert repr(encoder) == tree


def test_excluded_sparse_convolution_stays_float(encoder, scene):
    path = "encoder_layers.encoder_layer1.0.conv1"
    result = qnn.quantize_model(encoder, qnn.QuantConfig(exclude=(path,)), scene, inplace=True)
    assert type(encoder.get_submodule(path)).__name__ == "SubMConv3d"
    assert [(i.path, i.reason) for i in result.skipped] == [(path, f"excluded by {path!r}")]
    assert torch.isfinite(encoder(*scene)).all()


def test_sparse_input_of_the_example_pass_keeps_its_rulebooks(spconv, sparse_nets, cloud):
    block, x = sparse_nets.SparseBasicBlock(3, "k").eval(), cloud(3)
    features = x.features.clone()
    qnn.quantize_model(block, example_inputs=x, inplace=True)
    assert x.indice_dict == {}
    assert torch.equal(x.features, features)


def test_tables_of_sparse_tensors_are_quantized_as_what_they_compute(spconv, cloud):
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(spconv.SubMConv3d(4, 4, 3, indice_key="a") for _ in range(3))
            self.add, self.join = spconv.AddTable(), spconv.JoinTable()
            self.last = spconv.SubMConv3d(8, 4, 3, indice_key="a")

        def forward(self, x):
            made = [conv(x) for conv in self.convs]
            return self.last(self.join([self.add(made), made[0]]))

    model, x = Tables().eval(), cloud(4)
    result = qnn.quantize_model(model, example_inputs=x, inplace=True)
    paths = [item.path for item in result.quantized]
    assert {"add.quant_add", "add.quant_add_1", "join.quant_concat"} <= set(paths)
    assert type(model.add).__name__ == "AddTable"
    concat = model.join.quant_concat.input_quantizer
    assert model.last.input_quantizer is concat  # it holds the same values
    assert model.add.quant_add.input_quantizer is concat  # the first operand is also joined
    assert [item for item in result.skipped if "stay" in item.reason] == []
