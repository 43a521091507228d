"""Distributions as pip leaves them in a folder on sys.path: modules, and metadata with entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str],
    version: str = "1.2",
) -> None:
    """`entry_points`: by group, then by name. `modules`: source code by path."""
    for path, source in modules.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    lines = (
        line
        for group, points in entry_points.items()
        for line in (f"[{group}]", *(f"{point} = {value}" for point, value in points.items()))
    )
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
