"""Running a model again from the first layer that changed, with the results of a full run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import called, running
from bevquant_graph import evaluation as in_evaluation
from bevquant_qnn._snapshots import UnknownValue, copied, kept, same, tensors
from bevquant_qnn._steps import is_library_module
from bevquant_quantizers import TensorQuantizer, quantization_disabled

# Running a model on example inputs without leaving a trace.


def run(model: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the model; a note in an error says whether the model was changed."""
    advice = "It is as it was before; give inputs that it takes."
    with running(model, "quantize_model", advice):
        return called(model, args, kwargs)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, quantizers bypassed; each put back as it was."""
    # Inference tensors do not count in-place changes, which the analysis has to see.
    with (
        quantization_disabled(model), in_evaluation(model),
        torch.inference_mode(False), torch.no_grad(),
    ):  # fmt: skip
        yield


Forward = Callable[..., Any]
Calls = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]


class Watch:
    """The modules of a model, except the model itself and scripted ones."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: Calls | None = None
        made: dict[type[Any], type[Any]] = {}
        self._classes: list[tuple[nn.Module, type[Any], type[Any]]] = []
        for module in model.modules():
            cls = type(module)
            if module is model:
                continue
            if cls not in made:
                made[cls] = self._watched(cls)
            self._classes.append((module, cls, made[cls]))

    @contextmanager
    def seeing(self, calls: Calls) -> Iterator[None]:
        """Run a block in which `calls(module, forward, args, kwargs)` stands for every forward.

        `forward` is the module's own.
        """
        changed = []
        self._calls = calls
        try:
            for module, own, watched in self._classes:
                try:
                    # Objects of some classes have another memory layout and take no other class.
                    object.__setattr__(module, "__class__", watched)
                except TypeError:
                    continue
                changed.append((module, own))
            yield
        finally:
            self._calls = None  # whose owner holds this: both go, with all maps, where it is let go
            for module, own in changed:
                object.__setattr__(module, "__class__", own)

    def _watched(self, cls: type[Any]) -> type[Any]:
        watch = self

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            def own(*inner: Any, **options: Any) -> Any:
                # super() binds static forwards and class methods as torch calls them
                return super(made, self).forward(*inner, **options)  # type: ignore[misc]

            return watch._calls(self, own, args, kwargs)  # type: ignore[misc]

        names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        made: type[Any] = type(cls.__name__, (cls,), {**names, "forward": forward})
        return made


Run = Callable[[nn.Module], Any]


@dataclass(eq=False, slots=True)
class _Call:
    """One call: the module, and the number of the first call after it and those within it."""

    module: nn.Module
    pure: bool
    end: int = 0
    answerable: bool = False
    args: Any = None
    output: Any = None
    versions: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()


# A BaseException, which no `except Exception` of a forward catches.
class _Enough(BaseException):
    """The outputs asked for are there."""


class Replay:
    """One recorded run of a model on one batch, and runs that repeat only what a change reaches.

    The record holds what every module call got and gave. When the model runs again with other
    settings of some quantizers, a call is answered from the record if no change reaches it. So the
    result is the plain run's as long as modules compute from their inputs alone. `outputs` are
    paths of the modules whose outputs are the result; by default it is the model's own.
    """

    def __init__(self, model: nn.Module, run: Run, outputs: tuple[str, ...] = ()) -> None:
        self._model = model
        self._watch = Watch(model)
        self._run = run
        self._targets: dict[nn.Module, str] = {model.get_submodule(p): p for p in outputs}
        self._outputs = outputs
        self._calls: list[_Call] = []
        self._pure: dict[nn.Module, bool] = {}
        self._target_outputs: dict[int, Any] = {}
        self._captured: dict[str, Any] = {}
        self._expected = 0
        self.output = self._record()

    def __call__(self, changed: Collection[TensorQuantizer]) -> Any:
        """The output with these quantizers, which are all that differ from the recorded run."""
        chosen = set(changed)
        hits = [i for i, call in enumerate(self._calls) if call.module in chosen]
        if not hits:
            return self.output
        self._position, self._first, self._hits = 0, hits[0], hits
        return self._ended(self._answer)

    def _record(self) -> Any:
        """Run once; once more where outputs turn out to be changed in place afterwards."""
        shared: frozenset[int] = frozenset()
        while True:
            self._calls, self._target_outputs, self._shared = [], {}, shared
            result = self._ended(self._note)
            late = {
                i
                for i, call in enumerate(self._calls)
                if call.answerable and i not in shared and _versions(call.output) != call.versions
            }
            if not late:
                break
            shared = shared | late
        for call in self._calls:
            # An input that was changed afterwards says nothing about the next run's.
            call.pure = call.pure and _versions(call.args) == call.seen
        self._expected = len(self._target_outputs)
        return result

    def _ended(self, calls: Any) -> Any:
        self._captured, self._count = {}, 0
        try:
            with self._watch.seeing(calls):
                result = self._run(self._model)
        except _Enough:
            result = None
        if not self._targets:
            return result
        return captured_outputs(self._captured, self._outputs)

    def _note(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = _Call(module, self._is_pure(module))
        number = len(self._calls)
        self._calls.append(call)
        try:
            before = [(tensor, _version(tensor)) for tensor in tensors((args, kwargs))]
        except UnknownValue:
            before = None
        if before is None:
            call.pure = False
        elif call.pure:
            call.args = kept((args, kwargs))
            call.seen = tuple(version for _, version in before)
        output = forward(*args, **kwargs)
        call.end = len(self._calls)
        if before is not None and not isinstance(module, TensorQuantizer):
            # A call that writes to its inputs, or returns their memory, is never answered.
            untouched = all(_version(tensor) == version for tensor, version in before)
            try:
                own = untouched and not _share_memory(output, [tensor for tensor, _ in before])
            except UnknownValue:
                own = False
            if own:
                call.answerable = True
                call.output = (copied if number in self._shared else kept)(output)
                call.versions = _versions(output)
        if module in self._targets:
            self._target_outputs[number] = copied(output)
            self._capture(number)
        return output

    def _answer(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        number = self._position
        call = self._calls[number] if number < len(self._calls) else None
        if call is None or call.module is not module:
            raise RuntimeError(_OTHER_ORDER.format(type(module).__name__))
        if self._is_known(number, call, args, kwargs):
            self._position = call.end
            for inner in range(number, call.end) if self._targets else ():
                if inner in self._target_outputs:
                    self._capture(inner)
            # What the caller changes in place must not be the record's own.
            return (copied if number in self._shared else kept)(call.output)
        self._position = number + 1
        output = forward(*args, **kwargs)
        if self._position != call.end:
            raise RuntimeError(_OTHER_ORDER.format(type(module).__name__))
        if number in self._target_outputs:
            self._capture(number, output)
        return output

    def _is_known(self, number: int, call: _Call, args: Any, kwargs: Any) -> bool:
        if not call.answerable:
            return False
        # It ended before the first call of a changed quantizer.
        if call.end <= self._first:
            return True
        # A branch that the change does not reach.
        return (
            call.pure
            and not any(number <= hit < call.end for hit in self._hits)
            and same(call.args, (args, kwargs))
        )

    def _capture(self, number: int, output: Any = None) -> None:
        """Note an output that was asked for, by default the recorded one."""
        path = self._targets[self._calls[number].module]
        self._captured[path] = copied(self._target_outputs[number] if output is None else output)
        self._count += 1
        if self._count == self._expected:
            raise _Enough

    def _is_pure(self, module: nn.Module) -> bool:
        """Whether it computes from its inputs alone, for all that is known of libraries."""
        if module not in self._pure:
            self._pure[module] = all(is_library_module(m) for m in module.modules())
        return self._pure[module]


def captured_outputs(captured: Mapping[str, Any], outputs: Sequence[str]) -> tuple[Any, ...]:
    """Outputs of the modules at these paths; refuses paths that the model did not call."""
    missing = [path for path in outputs if path not in captured]
    if missing:
        raise ValueError(
            f"sensitivity: the model does not call {', '.join(missing)}; name modules that "
            "run, or leave outputs out to use the model's own"
        )
    return tuple(captured[path] for path in outputs)


_OTHER_ORDER = (
    "sensitivity: the model does not call its modules in the order of its first run (at a "
    "{}); results cannot be reused in a model whose control flow hangs on values"
)


def _version(tensor: Tensor) -> int:
    # Inference tensors have no version.
    return 0 if tensor.is_inference() else tensor._version


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(_version(tensor) for tensor in tensors(value))


def _share_memory(output: Any, inputs: list[Tensor]) -> bool:
    storages = {t.untyped_storage().data_ptr() for t in inputs if t.layout is torch.strided}
    return any(
        t.untyped_storage().data_ptr() in storages
        for t in tensors(output)
        # Voxels are handed on as they are; nobody writes coordinates in place.
        if t.layout is torch.strided and t.numel() and t.is_floating_point()
    )
