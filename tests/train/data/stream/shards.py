"""Shards for tests: texts and pictures, written as their users' own tools write them."""

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of uneven length, no two alike."""
    draw = np.random.default_rng(seed)
    return [f"<{i}>" + "".join(map(chr, draw.integers(97, 123, draw.integers(5, 60)))) for i in range(count)]


def picture(number: int, classes: int = 4, size: int = 6) -> tuple[bytes, int]:
    """A PNG whose first pixels say its number, and its class."""
    pixels = np.zeros((size, size, 3), np.uint8)
    pixels[0, 0] = number % 256, number // 256, 7
    pixels[1:] = number % classes * 60
    body = io.BytesIO()
    Image.fromarray(pixels).save(body, "PNG")
    return body.getvalue(), number % classes


def number_of(pixels: np.ndarray) -> int:
    """The number of a picture, as read: [C, H, W] in 0..1."""
    red, green = np.rint(pixels[:2, 0, 0] * 255).astype(int).tolist()
    return red + 256 * green


def archive(samples: Sequence[tuple[str, Mapping[str, bytes]]]) -> bytes:
    """A tar of (key, field → bytes)."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        for key, fields in samples:
            for field, value in fields.items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value))
    return body.getvalue()


def picture_tars(count: int, shards: int) -> Iterator[bytes]:
    """Tars with `count` pictures in all, unevenly."""
    cuts = np.linspace(0, count, shards + 1).astype(int) + np.arange(shards + 1) % 2
    cuts[0], cuts[-1] = 0, count
    for first, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        read = [(i, *picture(i)) for i in range(first, end)]
        yield archive([(f"a/{i:06d}", {"png": body, "cls": str(label).encode()}) for i, body, label in read])


def lines(documents: Sequence[str]) -> bytes:
    """Documents as lines of JSON."""
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


def written(folder: Path, bodies: Iterator[bytes] | Sequence[bytes], ending: str) -> str:
    """Write shards; the pattern that means them."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for body in bodies:
        (folder / f"{count:03d}.{ending}").write_bytes(body)
        count += 1
    return f"{folder}/{{000..{count - 1:03d}}}.{ending}"
