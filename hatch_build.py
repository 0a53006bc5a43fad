"""Metadata of the distribution `bevquant`: all packages of this repository in one.

Requirements, commands and entry points are the union of those of the packages, read from their
pyproject files. A requirement on another package of the repository is dropped: it is included.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

EXTRAS = "cpu cu120 cu124 cu126 onnxruntime openvino numba nuscenes feather yaml pt2e".split()
INCLUDED = ("numba", "onnx", "pictures", "progress")  # small: without asking for them
ALL = ("cpu", "onnxruntime", "openvino", "yaml", "feather")  # nuscenes-devkit holds numpy below 2


def metadata_of(root: Path) -> dict[str, Any]:
    """The fields of `[project]` that the packages determine."""
    projects = [
        tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for path in sorted(root.glob("*/*/pyproject.toml"))
    ]
    ours = {project["name"] for project in projects}

    def third_party(requirements: list[str]) -> list[str]:
        return [r for r in requirements if r.split("[")[0].split(">")[0].strip() not in ours]

    def of_extras(*names: str) -> list[str]:
        found = (p.get("optional-dependencies", {}).get(n, []) for p in projects for n in names)
        return sorted({r for requirements in found for r in third_party(requirements)})

    needed = {r for project in projects for r in third_party(project["dependencies"])}
    extras = {name: of_extras(name) for name in EXTRAS}
    extras["all"] = sorted({requirement for name in ALL for requirement in extras[name]})
    entry_points: dict[str, dict[str, str]] = {}
    for project in projects:
        for group, entries in project.get("entry-points", {}).items():
            entry_points.setdefault(group, {}).update(entries)
    return {
        "dependencies": sorted({*needed, *of_extras(*INCLUDED)}),
        "optional-dependencies": extras,
        "scripts": {k: v for project in projects for k, v in project.get("scripts", {}).items()},
        "entry-points": entry_points,
    }


class CustomMetadataHook(MetadataHookInterface):
    """Called by hatchling."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill the fields that pyproject.toml calls dynamic."""
        metadata.update(metadata_of(Path(self.root)))
