"""Float, fake-quantized and integer model on the same frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from bevfusion_quant.bpu._follow import Follower, Models
from bevfusion_quant.bpu._probe import NodeProbe
from bevfusion_quant.bpu._tallies import Tallies
from bevfusion_quant.measure import Judgement, LayerRow, PairSums, whole_output
from bevfusion_quant.results import BpuComparison

if TYPE_CHECKING:
    from bev_data.metrics import AccuracyTally
    from bevfusion.model import BEVFusionConfig
    from bevfusion_quant.bpu._labels import Label
    from bevfusion_quant.bpu._quantize import Forms
    from bevfusion_quant.frames import FrameBatches

__all__ = ["compare_forms", "node_probes"]


def node_probes(
    forms: Mapping[str, Forms], labels: Mapping[str, Mapping[str, Label]]
) -> dict[str, NodeProbe]:
    """What to watch, by "unit/node": everything called that all three graphs of a unit have."""
    probes = {}
    for unit, form in forms.items():
        graphs = (form.float_graph, form.fake_graph, form.integer_graph)
        known = set.intersection(*({node.name for node in g.graph.nodes} for g in graphs))
        for node in form.fake_graph.graph.nodes:
            label = labels[unit].get(node.name)
            if label is None or node.name not in known:
                continue
            sources = tuple(f"{unit}/{source.name}" for source in node.all_input_nodes)
            probes[f"{unit}/{node.name}"] = NodeProbe(label, sources)
    return probes


def compare_forms(
    models: Models,
    probes: Mapping[str, NodeProbe],
    batches: FrameBatches,
    config: BEVFusionConfig,
    accuracy: AccuracyTally | None = None,
) -> BpuComparison:
    """Run the three models side by side on every batch.

    Args:
        models: Float, fake-quantized, integers.
        probes: From `node_probes`.
        batches: At least one.
        config: Sizes.
        accuracy: Is handed the models' detections, as "float", "quantized" and "integer".
    """
    follower, tallies = Follower(probes), Tallies(config, models.real.model, accuracy)
    whole, first, shape = PairSums(), None, torch.Size()
    for index, batch in enumerate(batches):
        with torch.no_grad():
            wanted, fake, got = follower.follow(models, batch)
        whole.add(whole_output(wanted), whole_output(fake))
        shape = whole_output(wanted).shape
        frame = index, batches.names[index][0]
        tallies.add(frame, wanted, fake, got, batches.frame_labels(index))
        first = wanted if first is None else first
    layers = follower.layers()
    table = [
        LayerRow(
            *(row.layer, row.operator, row.channels, row.cells, row.fake_sqnr_db, row.fake_cosine),
            *(row.saturated, row.input_amax),
        )
        for row in layers
    ]
    kind = "heatmap" if isinstance(first, dict) else "bird's-eye view"
    cells = shape.numel() / shape[1]
    table.append(LayerRow("output", kind, shape[1], cells, whole.sqnr_db, whole.cosine, None, None))
    agreement, found = tallies.fake()
    judgement = Judgement(
        table,
        follower.maps(),
        [],
        agreement,
        found,
        tallies.first,
        tallies.float_detections,
        first,
    )
    integer_agreement, integer_found = tallies.integer()
    return BpuComparison(
        judgement, layers, follower.stages(), tuple(integer_agreement), tuple(integer_found)
    )
