"""Folders of classes, and the pictures in them. No torch here."""

import os
from pathlib import Path

from unisono.spec.errors import UsageError
from unisono.train.data.documents import existing

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def classes_of(folder: str) -> list[str]:
    """The names of its class folders, in order. Raises UsageError D02, D04."""
    place = existing(folder)
    names = (
        sorted(p.name for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))
        if place.is_dir()
        else []
    )
    if not names:
        raise UsageError(
            "there are no folders of classes",
            code="D04",
            where=str(place),
            likely="the pictures lie in the folder itself",
            fix="a folder for each class, with its pictures in it",
        )
    return names


def listed(folder: str) -> list[tuple[str, int]]:
    """(path, number of its class) of each picture, in order. Raises UsageError D02, D04."""
    place, entries = existing(folder), list[tuple[str, int]]()
    for label, name in enumerate(classes_of(folder)):
        inside = (Path(at, file) for at, _, files in os.walk(place / name) for file in files)
        entries += [(str(path), label) for path in sorted(inside) if path.suffix.lower() in ENDINGS]
    if not entries:
        raise UsageError(
            "the folders of classes hold no pictures",
            code="D04",
            where=str(place),
            fix=f"files that end in {' '.join(ENDINGS)}",
        )
    return entries
