"""Installed packages with entry points, for tests."""

from pathlib import Path


def install(folder: Path, entry_points: str) -> None:
    """Write the metadata of a package into a folder on the import path."""
    metadata = folder / "package_of_tests-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: package-of-tests\nVersion: 1.0\n", encoding="utf8")
    (metadata / "entry_points.txt").write_text(entry_points, encoding="utf8")
