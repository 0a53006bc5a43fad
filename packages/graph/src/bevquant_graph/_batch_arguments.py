"""A loader's batch as arguments of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ._frames import frames_of, one_example
from ._kinds import run_on
from ._own_inputs import own_inputs
from ._quiet import evaluation
from ._signature import Arguments, Leaf, entries, flatten, is_sparse_tensor, place_name
from ._state import called, state_kept

Forward = Callable[[nn.Module, Any], Any]
_LINE = "forward=lambda m, b: m(b[0])"


def batch_arguments(model: nn.Module, batch: Any, *, example: bool = False) -> Arguments:
    """Positional and keyword arguments of a batch, by the signature of the model's forward.

    | batch | forward | call |
    |---|---|---|
    | ``(a, b)`` or ``[a, b]`` | takes as many positional arguments | ``m(a, b)`` |
    | ``(image, label)`` | takes one | ``m(image)`` |
    | ``(image, label)`` | the second is optional | refused; an example is positional |
    | list as an example | requires one, or none | ``m(batch)``, but ``m(image)`` of a label |
    | list of dicts as an example | has parameters of all their keys | several frames |
    | list of tuples as an example | takes as many, with members that are no tensors | the same |
    | list of tuples of tensors as an example | runs on the first | the same |
    | dict | has parameters of all its keys, or ``**kwargs`` | ``m(**batch)`` |
    | dict | has a parameter of some keys, among them every required one | ``m`` of those |
    | dict | has a parameter of none, and takes one argument | ``m(batch)`` |
    | anything else | | ``m(batch)`` |

    A dict is any mapping, or an object with ``keys`` and members such as a `UserDict`. A label is
    an integer, a string, a list or dict of labels, or a tensor of integers, of no axis or of one
    axis as long as the batch. Beside a single parameter it is also any second member that cannot
    be an image: lists, dictionaries, tensors of integers or of up to one axis.

    Args:
        model: Its forward's signature is read; it is not run.
        batch: A loader's batch.
        example: Whether it is an example input: a tuple of positional inputs, a dict of named
            ones, or one input, which may be a list.

    Of several frames the arguments are those of the first. Floats, integers and numpy arrays that
    are others in another frame are inputs of a graph.

    Example:
        >>> net, image, label = nn.Flatten(), torch.ones(1, 2, 2), torch.tensor([3])
        >>> [len(batch_arguments(net, batch)[0]) for batch in (image, (image,), (image, label))]
        [1, 1, 1]
        >>> batch_arguments(net, {"image": image, "label": label})[0][0].keys()
        dict_keys(['image', 'label'])
    """
    frames = frames_of(model, batch) if example else None
    # Tuples of tensors may be frames or arguments: runs of the forward decide.
    if frames is not None and (_mixed(frames) or _are_frames(model, batch, frames[0])):
        return one_example(model, frames)
    given = _one_call(model, batch, example)
    if example:
        leaves, tree = flatten(given)
        places = (place for place, entry in entries(tree) if isinstance(entry, Leaf))
        for place, value in zip(places, leaves, strict=True):
            if isinstance(value, Tensor) and value.is_meta:
                raise TypeError(
                    f"example input {place_name(model, place)} is on the meta device, without "
                    "values; give a tensor of a real frame"
                )
    return given


def _one_call(model: nn.Module, batch: Any, example: bool) -> Arguments:
    """The arguments of a batch that is no list of frames."""
    mapping = _is_mapping(batch)
    if not mapping and not isinstance(batch, tuple | list):
        return (batch,), {}
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (AttributeError, TypeError, ValueError):  # compiled code has no signature
        return ((), dict(batch.items())) if mapping else (tuple(batch), {})
    if mapping:
        return _of_mapping(model, batch, parameters, example)
    if example and isinstance(batch, list) and not _is_pair(batch, parameters):
        required = [p for p in _positional(parameters) if p.default is p.empty]
        if len(required) <= 1:
            return (batch,), {}
    return _of_members(model, tuple(batch), parameters, example), {}


def _mixed(frames: list[Arguments]) -> bool:
    """Whether frames are named inputs, or hold members that are no tensors."""
    args, kwargs = frames[0]
    members = entries(flatten(args)[1])
    return bool(kwargs) or any(not isinstance(entry, Leaf) for _, entry in members)


def _are_frames(model: nn.Module, batch: list[Any], first: Arguments) -> bool:
    """Whether a list of tuples of tensors is several frames, by runs of the forward."""
    one = _one_call(model, batch, example=True)
    if not _runs(model, one):
        return True
    if not _runs(model, first):
        return False
    raise TypeError(
        f"{type(model).__name__}.forward runs on the example in two ways: as {len(batch)} frames, "
        "and as one call with the list or its tuples as arguments; give frames as dicts of named "
        "inputs, or the arguments of one call as a tuple"
    )


def _runs(model: nn.Module, given: Arguments) -> bool:
    try:
        with evaluation(model), torch.no_grad():
            called(model, *given)
    except Exception:
        return False
    return True


def on_batch(forward: Forward | None = None, *, keeps_state: bool = True) -> Forward:
    """A function of a model and a batch that leaves both unchanged.

    Args:
        forward: Called as ``forward(model, batch)``. None: `batch_arguments` decides.
        keeps_state: Whether the model's own state is restored after each batch (`state_kept`).

    Example:
        >>> run, frame = on_batch(), {"input": torch.ones(2)}
        >>> run(nn.ReLU(inplace=True), frame), run(nn.Threshold(3, 0, inplace=True), frame), frame
        (tensor([1., 1.]), tensor([0., 0.]), {'input': tensor([1., 1.])})
    """

    def run(model: nn.Module, batch: Any) -> Any:
        with state_kept(model) if keeps_state else nullcontext():
            return (forward or _called_on)(model, own_inputs(batch))

    return run


def _called_on(model: nn.Module, batch: Any) -> Any:
    args, kwargs = batch_arguments(model, batch)
    return run_on(model, args, kwargs)


def as_example(model: nn.Module, inputs: Any) -> Any:
    """Example inputs as a tuple of positional inputs or a dict of named inputs (`batch_arguments`).

    Example:
        >>> as_example(nn.Flatten(), [torch.ones(2, 3), torch.tensor([0, 1])])
        (tensor([[1., 1., 1.],
                [1., 1., 1.]]),)
    """
    args, kwargs = batch_arguments(model, inputs, example=True)
    return kwargs or args


def _is_mapping(value: Any) -> bool:
    if isinstance(value, Tensor | nn.Module) or is_sparse_tensor(value):
        return False
    # Asked of the class: some objects have every attribute.
    duck = all(hasattr(type(value), name) for name in ("keys", "items", "__getitem__"))
    return isinstance(value, Mapping) or duck


def _positional(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _is_pair(batch: list[Any], parameters: list[inspect.Parameter]) -> bool:
    """Whether a list is an image and a label, for a forward that takes one argument."""
    single = len(parameters) == 1 and len(_positional(parameters)) == 1
    return single and len(batch) == 2 and _is_label(batch[1], _length(batch[0]))


def _of_members(
    model: nn.Module, members: tuple[Any, ...], parameters: list[inspect.Parameter], example: bool
) -> tuple[Any, ...]:
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return members
    taken = _positional(parameters)
    required = [p for p in taken if p.default is p.empty]
    pair = len(members) == 2
    if pair and len(taken) == 1 and _is_no_image(members[1]):
        return members[:1]
    if example:  # the call, or its caller, names wrong arguments
        return members
    optional = len(taken) > 1 and len(required) <= 1
    labelled = pair and optional and _is_label(members[1], _length(members[0]))
    if len(members) > len(taken) or labelled:
        fits = "takes" if len(members) > len(taken) else "may take its second member in"
        raise TypeError(
            f"{type(model).__name__}.forward({', '.join(p.name for p in taken)}) {fits} "
            f"{len(taken)} positional arguments, the batch has {len(members)} members; say which "
            f"of them it takes, as in {_LINE}"
        )
    return members


def _length(value: Any) -> int | None:
    """Frames of a batch, where it says so."""
    if isinstance(value, Tensor):
        return len(value) if value.dim() else None
    if is_sparse_tensor(value):
        return int(value.batch_size)
    return len(value) if isinstance(value, tuple | list) else None


def _is_label(value: Any, length: int | None) -> bool:
    """Whether a second member can only be a label."""
    if isinstance(value, Tensor):
        # A tensor of truth values is a mask, not a label.
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return whole and (value.dim() == 0 or (value.dim() == 1 and len(value) == length))
    if isinstance(value, tuple | list | Mapping) and value:
        members = value.values() if isinstance(value, Mapping) else value
        return all(_is_label(member, length) for member in members)
    return isinstance(value, int | str) and not isinstance(value, bool)


def _is_no_image(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() <= 1 or not (value.is_floating_point() or value.dtype == torch.bool)
    return isinstance(value, int | str | tuple | list | Mapping)


def _of_mapping(
    model: nn.Module, batch: Any, parameters: list[inspect.Parameter], example: bool
) -> Arguments:
    items = dict(batch.items())
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    taken = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = {p.name for p in taken if p.default is p.empty}
    known = items.keys() & named.keys()
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if (example or required <= items.keys()) and (open_ended or len(known) == len(items)):
        return (), items
    if known and required <= known:
        return (), {name: items[name] for name in items if name in known}
    if not known and len(required) <= 1 and parameters:
        return (batch,), {}
    if example:
        return (), items
    names = ", ".join(p.name for p in parameters)
    raise TypeError(
        f"{type(model).__name__}.forward({names}) has no parameters "
        f"{', '.join(sorted(map(str, required - items.keys()))) or 'for them'} among the batch's "
        f"keys {', '.join(map(str, items))}; give the call, as in "
        "forward=lambda m, b: m(b['image'])"
    )
