"""A part of a graph gives the bits that the whole has there."""

import pytest
import torch
from torch import nn

from bevquant_graph import capture, named_results, nodes_behind, op_spec, part_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, image, mask, scale):
        y = self.first(image)
        z = self.second(torch.relu(y))
        return {"y": [y], "z": z.view(image.shape[0], -1) * scale, "mask": mask}


IMAGES = torch.randn(2, 3, 8, 8), torch.randn(5, 3, 8, 8)
MASK = torch.ones(1)


@pytest.fixture(scope="module")
def whole():
    return capture(Net().eval(), (IMAGES[0], MASK, torch.tensor(1.0)))


def relu_of(graph):
    return next(node for node in graph.operations if op_spec(node.target).kind == "relu")


def test_two_parts_give_the_whole_on_other_sizes(whole):
    results, relu = named_results(whole), relu_of(whole)
    assert list(results) == ["y_0", "z", "mask"]
    before = part_of(whole, {"x": relu, "y": results["y_0"]})
    scale = whole.placeholders[2]
    behind = part_of(whole, {"": results["z"]}, {"x": relu, "scale": scale})
    assert before.input_names == whole.input_names
    assert behind.input_names == ["x", "scale"]
    for image, factor in zip(IMAGES, torch.tensor([1.0, 3.0]), strict=True):
        wanted = whole.replay(image, MASK, factor)
        made = before.replay(image, MASK, factor)
        assert torch.equal(made["y"], wanted["y"][0])
        # How many images there are, it reads from x.
        assert torch.equal(behind.replay(x=made["x"], scale=factor), wanted["z"])


def test_nodes_keep_their_modules_and_lines(whole):
    given = {"x": relu_of(whole), "scale": whole.placeholders[2]}
    results = {"z": named_results(whole)["z"]}
    part = part_of(whole, results, given)
    wanted = nodes_behind(whole, [whole.outputs[1]], given.values())
    places = {whole.describe(node) for node in wanted}
    assert {n for n in map(part.describe, part.operations) if "sym_size" not in n} <= places
    assert part.called == {"", "second"}


def test_an_input_that_is_not_given_is_named(whole):
    with pytest.raises(ValueError, match="reads the input scale, which is not given"):
        part_of(whole, {"z": named_results(whole)["z"]}, {"x": relu_of(whole)})
