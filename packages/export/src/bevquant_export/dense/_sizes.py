"""Sizes of tensors, constant or free along the batch."""

from __future__ import annotations

from typing import Any

import torch

from bevquant_export.dense._source import Ref, Source, Step, names_in, replaced


class Sizes:
    """Shapes and host values of a program, as far as a file may hold them as constants.

    Args:
        source: With one run, all sizes are constants; with two, those that differ follow the
            batch.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def free(self) -> bool:
        """Whether the batch may vary."""
        return bool(self._source.wider)

    def is_host(self, name: str) -> bool:
        """Whether the value is no tensor."""
        return name in self._source.hosts

    def number(self, name: str) -> Any:
        """A host value in the first run."""
        return self._source.hosts[name]

    def of(self, name: str) -> Any:
        """Shape in the first run."""
        return self._source.shapes[name]

    def dtype(self, name: str) -> Any:
        """Type of the tensor in the file, as torch's: float32 for what is integers of a scale."""
        form = self._source.program.values.get(name.partition("[")[0])
        if form is not None and form.form not in ("float", "host"):
            return torch.float32
        return self._source.dtypes.get(name, torch.float32)

    def named(self, name: str) -> tuple[int | str, ...]:
        """Shape, with names for the sizes that follow the batch."""
        return tuple(
            m if isinstance(m, str) else n if n == m else "batch" if axis == 0 else f"{name}_{axis}"
            for axis, (n, m) in enumerate(zip(*self._runs(name), strict=True))
        )

    def _runs(self, name: str) -> tuple[Any, Any]:
        """Shape in the first run and in the second one."""
        shape = self._source.shapes[name]
        return shape, self._source.wider.get(name, shape)

    def target(self, path: str, name: str, source: str | None = None) -> list[int]:
        """What a Reshape to the shape of `name` is given: −1 for the size that is free.

        0, the size of the same axis of what is reshaped, for those that are `source`'s, if several
        are free.

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
                "tensor follow the batch; expected one. Export with dynamic_batch=False"
            )
        return sizes

    def varies(self, value: Any) -> bool:
        """Whether a size or number among arguments is computed from what the file is given."""
        if not isinstance(value, Ref) or value.name not in self._source.hosts:
            return False
        return self.free and value.name not in self._source.wider_hosts

    def counts(self, step: Step) -> bool:
        """Whether a number among a step's arguments is computed from what the file is given."""
        return any(self.varies(Ref(name)) for name in step.inputs)

    def constants(
        self, path: str, values: Any, *, sizes: bool = False, counted: bool = False
    ) -> Any:
        """Arguments with every host value as it was.

        Args:
            path: Module that a message names.
            values: Arguments; `Ref`s of tensors stay.
            sizes: The sizes of the result are read from the run, so host values may vary.
            counted: Numbers that are computed from what the file is given stay `Ref`s.

        Raises:
            ValueError: A host value that follows the batch.
        """
        if self.free and not sizes:
            hosts, wider = self._source.hosts, self._source.wider_hosts
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
            known = self.is_host(ref.name) and not (counted and self.varies(ref))
            return self._source.hosts[ref.name] if known else ref

        return replaced(values, read)
