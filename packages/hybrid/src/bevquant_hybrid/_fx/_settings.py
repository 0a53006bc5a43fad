"""Settings of each module: by model, class, name, and its own attribute."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from bevquant_hybrid.nn.intrinsic import Fused, anchor_of

_UNSET: Any = object()


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that settings by class go by: of a fused module, its layer's."""
    return type(anchor_of(module))


def anchor_path_of(module: nn.Module, path: str) -> str:
    """The name that settings by name go by: of a fused module, where its layer was."""
    return getattr(anchor_of(module), "anchor_path", path) if isinstance(module, Fused) else path


class Settings:
    """A qconfig for every module of a model.

    Precedence: ``""`` < ``"module_type"`` < ``"module_name"`` < the module's own ``qconfig``
    attribute; a module without a setting inherits its parent's. None: float.
    """

    def __init__(self, root: nn.Module, qconfig_dict: dict[str, Any] | None) -> None:
        given = {} if qconfig_dict is None else qconfig_dict
        if not isinstance(given, dict):
            raise TypeError(
                f'qconfig_dict: expected a dictionary like {{"": qconfig}}, got {type(given)}'
            )
        unknown = sorted(set(given) - {"", "module_type", "module_name"})
        if unknown:
            raise ValueError(
                f"qconfig_dict: unknown key {unknown[0]!r}; expected '', 'module_type' or "
                "'module_name'"
            )
        self._types = _pairs("module_type", given.get("module_type", ()))
        self._names = _pairs("module_name", given.get("module_name", ()))
        self._of: dict[str, Any] = {}
        self._modules = dict(root.named_modules(remove_duplicate=False))
        start = given.get("", _UNSET)
        if start is not _UNSET:
            _expect_qconfig("", start)
        _warn_of_unknown_names("qconfig_dict", self._names, self._modules, stacklevel=6)
        # Parents stand before their children.
        for path, module in self._modules.items():
            parent = self._of[path.rpartition(".")[0]] if path else start
            # What was made for a function has the settings of the place of its call.
            generated_in = getattr(module, "generated_in", None)
            if generated_in is not None:
                parent = self._of[generated_in]
            self._of[path] = self._resolve(path, module, parent)
        for path, module in self._modules.items():
            # A fused layer's former name counts, and its present one above that.
            origin = anchor_path_of(module, path)
            if origin != path:
                self._of[path] = self._resolve(
                    path, module, self._resolve(origin, module, self._parent(origin))
                )

    def _parent(self, path: str) -> Any:
        return self._of[path.rpartition(".")[0]]

    def _resolve(self, path: str, module: nn.Module, inherited: Any) -> Any:
        found = self._types.get(class_of(module), inherited)
        found = self._names.get(path, found)
        return module.__dict__.get("qconfig", found)

    def of(self, path: str) -> Any:
        """The qconfig of a module, or None."""
        found = self._of.get(path, _UNSET)
        return None if found is _UNSET else found

    def has_no_setting_for(self, path: str) -> bool:
        """Whether no setting reaches a module (None is a setting)."""
        return self._of.get(path, _UNSET) is _UNSET

    @property
    def any(self) -> bool:
        """Whether any module has a qconfig."""
        return any(q is not None and q is not _UNSET for q in self._of.values())


def _pairs(key: str, entries: Any) -> dict[Any, Any]:
    try:
        pairs = dict(entries.items() if isinstance(entries, dict) else entries)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"qconfig_dict: {key!r} is {entries!r}: expected a list of pairs like "
            f"({'nn.Conv2d' if key == 'module_type' else repr('foo.bar')}, qconfig), or a "
            "dictionary"
        ) from error
    for which, qconfig in pairs.items():
        _expect_qconfig(which, qconfig)
    return pairs


def _expect_qconfig(which: Any, qconfig: Any) -> None:
    if qconfig is not None and not (hasattr(qconfig, "activation") and hasattr(qconfig, "weight")):
        raise TypeError(
            f"qconfig_dict: {which!r} is given {qconfig!r}: expected a qconfig, as "
            "get_default_qat_qconfig() returns one, or None"
        )


def _warn_of_unknown_names(
    setting: str, names: Iterable[str], known: Iterable[str], stacklevel: int
) -> None:
    known = [path for path in known if path]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3, 0.4)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            warnings.warn(
                f"{setting}: no module is named {name!r}{hint}", UserWarning, stacklevel=stacklevel
            )


class Names:
    """Modules that the user puts on the CPU, by name or by class."""

    def __init__(self, hybrid_dict: Mapping[str, Iterable[Any]] | None) -> None:
        given = dict(hybrid_dict or {})
        self.names: tuple[str, ...] = _entries("module_name", given.pop("module_name", ()), str)
        self.types: tuple[type, ...] = _entries("module_type", given.pop("module_type", ()), type)
        if given:
            raise ValueError(
                f"hybrid_dict: unknown key {min(given)!r}; expected 'module_name' or 'module_type'"
            )

    def warn_of_unknown_names(self, root: nn.Module) -> None:
        """Warn of every name and class that the model does not have."""
        known = [path for path, _ in root.named_modules(remove_duplicate=False)]
        _warn_of_unknown_names("hybrid_dict", self.names, known, stacklevel=5)
        classes = {class_of(module) for module in root.modules()}
        for kind in self.types:
            if kind not in classes:
                warnings.warn(
                    f"hybrid_dict: the model has no module of class {kind.__name__}",
                    UserWarning,
                    stacklevel=3,
                )

    def cover(self, paths: Iterable[str], modules: dict[str, nn.Module]) -> bool:
        """Whether any of the modules, or one that holds it, was named."""
        for path in paths:
            parts = path.split(".") if path else []
            for length in range(1, len(parts) + 1):
                holder = ".".join(parts[:length])
                module = modules.get(holder)
                if holder in self.names or (module is not None and class_of(module) in self.types):
                    return True
        return False


def _entries(key: str, values: Any, kind: type) -> tuple[Any, ...]:
    what = "a module's path" if kind is str else "a class"
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"hybrid_dict: {key} is {values!r}; expected a list, each {what}")
    found = tuple(values)
    for value in found:
        if not isinstance(value, kind):
            raise TypeError(f"hybrid_dict: {key} {value!r}; expected {what}")
    return found
