"""Going along with the integer model, with float and fake-quantized model one value ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from bevfusion_quant.bpu._probe import NodeProbe
from bevfusion_quant.measure import Leader, PairSums, StageMaps, StageProbe, lead
from bevfusion_quant.results import BpuLayer, BpuStage
from bevquant_hybrid.qtensor import QTensor, as_float

if TYPE_CHECKING:
    from bevfusion.model import Batch
    from bevfusion_quant.bpu._split import Note, SplitModel

__all__ = ["Follower", "Models"]

STAGES = ("neck", "camera", "lidar", "fuser", "decoder", "head")


class Models(NamedTuple):
    """The model three times; the parts on the CPU are the same modules."""

    real: SplitModel
    fake: SplitModel
    integer: SplitModel


@dataclass(eq=False)
class Follower:
    """Collects what three models compute, node by node.

    Args:
        probes: What to watch, by "unit/node"; nodes that all three have.
    """

    probes: Mapping[str, NodeProbe]
    _stages: dict[str, tuple[StageProbe, PairSums]] = field(default_factory=dict)
    _order: list[NodeProbe] = field(default_factory=list)

    def follow(self, models: Models, batch: Batch) -> tuple[Any, Any, Any]:
        """Run one batch; answers the three outputs.

        Only what is watched is handed out, so that no model's values pile up.
        """
        leaders: list[Leader[Any]] = []

        def leading(place: int) -> Callable[[], Any]:
            def run() -> Any:
                return models[place](*batch, note=self._watched(leaders[place].hand_out))

            return run

        def judge(name: str, got: Tensor) -> None:
            wanted, quantized = (leader.take(name) for leader in leaders)
            self._judge(name, wanted, quantized, got)

        with lead(leading(0)) as real, lead(leading(1)) as fake:
            leaders += [real, fake]
            got = models.integer(*batch, note=self._watched(judge))
            return real.result(), fake.result(), got

    def _watched(self, note: Note) -> Note:
        def tell(name: str, value: Tensor) -> None:
            if name in self.probes or name in STAGES:
                note(name, value)

        return tell

    def _judge(self, name: str, wanted: Tensor, fake: Tensor, got: Tensor) -> None:
        if name in STAGES:
            if name not in self._stages:
                self._stages[name] = StageProbe(name, ""), PairSums()
            stage, integers = self._stages[name]
            stage.add(wanted, as_float(fake))
            integers.add(wanted, as_float(got))
        elif isinstance(fake, QTensor) and isinstance(got, QTensor):
            probe = self.probes[name]
            if probe not in self._order:
                self._order.append(probe)
            probe.judge(wanted, fake, got)

    def layers(self) -> tuple[BpuLayer, ...]:
        """Operators that gave integers, in the order of execution."""
        known = {name: probe for name, probe in self.probes.items() if probe in self._order}
        return tuple(
            probe.row([known[name] for name in probe.sources if name in known])
            for probe in self._order
            if probe.is_operator
        )

    def maps(self) -> list[StageMaps]:
        """Float and fake-quantized maps of the first frame at the end of each stage."""
        return [stage.result() for stage, _ in self._stages.values()]

    def stages(self) -> tuple[BpuStage, ...]:
        """Both quantized models at the end of each stage."""
        rows = [(stage.result().row, integers) for stage, integers in self._stages.values()]
        return tuple(
            BpuStage(
                *(row.stage, row.title, row.channels, row.sqnr_db, row.cosine),
                *(integers.sqnr_db, integers.cosine),
            )
            for row, integers in rows
        )
