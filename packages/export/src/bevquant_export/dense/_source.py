"""A calibrated model as integer steps, with all sizes.

An exporter writes the steps that the simulator, or the model itself, runs, so the two cannot
disagree on the integers and scales of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bevquant_export.dense._program_of import QdqProgram
from bevquant_int8sim.program import Program, Ref, Step, names_in, replaced

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Source:
    """A program and one or two runs of it.

    Attributes:
        program: Steps in order.
        shapes: Tensor to its shape; of several tensors, a tuple of shapes, and ``name[i]`` to each.
        hosts: Sizes, numbers and the like by name.
        dtypes: Type of each tensor as the program holds it.
        wider: Shapes of a second run with twice the batch; with a name in the place of a size that
            follows the number of voxels. Empty where all sizes are constants.
        wider_hosts: Hosts of that run, without those that the file computes from its inputs' values
            and free sizes.
        inputs: Tensors that a call takes, in order, to the parameters that they go to.
        fixed: Numbers among the arguments, which are constants of the file.
        ranges: Accumulators that a sum reads to their largest absolute value in the run.
        sum_ranges: Ranges that sums' operands have in the program itself (`IntegerModel`).
        integer: What the program was read from, to run it again.
        grids: Of sparse tensors among the inputs, by their coordinates' name: grid and frames.
            Their coordinates are the input ``<features>.indices``.
        sparse: Whether there are voxels among its tensors.
    """

    program: Program
    shapes: Mapping[str, Any]
    hosts: Mapping[str, Any]
    dtypes: Mapping[str, torch.dtype]
    wider: Mapping[str, Any]
    wider_hosts: Mapping[str, Any]
    inputs: Mapping[str, str]
    fixed: Mapping[str, Any]
    ranges: Mapping[str, float]
    sum_ranges: Mapping[str, float]
    integer: QdqProgram
    grids: Mapping[str, tuple[Shape, int]] = field(default_factory=dict)
    sparse: bool = False

    def form(self, name: str) -> Any:
        """`Integers`, or ``"int32"`` or ``"float"``."""
        return self.program.values[name].form

    @property
    def free(self) -> bool:
        """Whether the batch may vary."""
        return bool(self.wider)

    def dtype(self, name: str) -> Any:
        """Torch type of the tensor in the file: float32 for quantized values."""
        values = self.program.values
        form = values.get(name) or values.get(name.partition("[")[0])
        if form is not None and form.form not in ("float", "host"):
            return torch.float32
        return self.dtypes.get(name, torch.float32)

    def named(self, name: str) -> tuple[int | str, ...]:
        """Shape, with names for the sizes that follow the batch."""
        return tuple(
            m if isinstance(m, str) else n if n == m else "batch" if axis == 0 else f"{name}_{axis}"
            for axis, (n, m) in enumerate(zip(*self._runs(name), strict=True))
        )

    def _runs(self, name: str) -> tuple[Any, Any]:
        """Shape in the first run and in the second one."""
        shape = self.shapes[name]
        return shape, self.wider.get(name, shape)

    def target(self, path: str, name: str, source: str | None = None) -> list[int]:
        """Shape argument of a Reshape to the shape of `name`: −1 for the free size.

        0, the size of the same axis of the input, for sizes of `source`, if several are free.

        Raises:
            ValueError: Several other sizes are free.
        """
        sizes = [-1 if isinstance(n, str) else n for n in self.named(name)]
        own = [] if source is None else list(zip(*self._runs(source), strict=True))
        for axis, pair in enumerate(zip(*self._runs(name), strict=True)):
            if sizes.count(-1) > 1 and sizes[axis] == -1 and own[axis : axis + 1] == [pair]:
                sizes[axis] = 0
        if sizes.count(-1) > 1:
            raise ValueError(
                f"export_qdq_onnx: {path or 'the model'}: {sizes.count(-1)} sizes of a reshaped "
                "tensor follow the batch or values of a frame; expected one. Give the others as "
                "numbers, and where they follow the batch export with dynamic_batch=False"
            )
        return sizes

    def varies(self, value: Any) -> bool:
        """Whether a size or number among arguments is computed from the file's inputs."""
        if not isinstance(value, Ref) or value.name not in self.hosts:
            return False
        return value.name not in self.wider_hosts

    def counts(self, step: Step) -> bool:
        """Whether a number among a step's arguments is computed from the file's inputs."""
        return any(self.varies(Ref(name)) for name in step.inputs)

    def constants(
        self, path: str, values: Any, *, sizes: bool = False, counted: bool = False
    ) -> Any:
        """Arguments with every host value of the run.

        Args:
            path: Module in messages.
            values: Arguments; `Ref`s of tensors stay.
            sizes: The sizes of the result are read from the run, so host values may vary.
            counted: Numbers computed from the file's inputs stay `Ref`s.

        Raises:
            ValueError: A host value that follows the batch.
        """
        if not sizes:
            hosts, wider = self.hosts, self.wider_hosts
            for name in (name for name in names_in(values) if name in hosts):
                if name not in wider:
                    if counted:
                        continue
                    raise ValueError(
                        f"export_qdq_onnx: {path or 'the model'}: an argument, {hosts[name]} on "
                        "the example, is computed from the values of a frame, and the file would "
                        "hold it as a constant; give the model a fixed one"
                    )
                if hosts[name] != wider[name]:
                    raise ValueError(
                        f"export_qdq_onnx: {path or 'the model'}: an argument follows the batch "
                        f"({hosts[name]}, then {wider[name]}), which the file holds as a "
                        "constant. Export with dynamic_batch=False"
                    )

        def read(ref: Ref) -> Any:
            known = ref.name in self.hosts and not (counted and self.varies(ref))
            return self.hosts[ref.name] if known else ref

        return replaced(values, read)
