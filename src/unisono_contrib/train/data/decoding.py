"""A process that decodes pictures: orders on stdin, answers on stdout, see `worker_pool`. No torch here."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from unisono.spec.errors import UsageError


def main() -> None:
    """Serve until stdin ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        try:
            answer = decoded(**json.loads(line))
        except UsageError as error:
            answer = {"error": {k: getattr(error, k) for k in ("what", "where", "likely", "fix", "code")}}
        except OSError as error:
            answer = {"errno": error.errno, "error": str(error), "file": str(error.filename or "")}
        print(json.dumps(answer), file=answers, flush=True)


def decoded(files: list[str], shape: list[int], out: str) -> dict[str, Any]:
    """Write the pictures of these files to OUT, uint8 [n, *shape]; tell which cannot be read, and why."""
    bad: list[tuple[int, str]] = []
    with open(out, "wb") as pixels:
        for at, file in enumerate(files):
            try:
                image = picture(file, shape)
            except UsageError:
                raise
            except Exception as error:  # a decoder may refuse a broken file in any way that it likes
                bad.append((at, f"{type(error).__name__}: {error}"))
                continue
            pixels.write(image)
        pixels.flush()
        os.fsync(pixels.fileno())
    return {"bad": bad, "made": len(files) - len(bad)}


def picture(file: str, shape: list[int]) -> bytes:
    """One picture, cut to the wanted ratio around its middle and resized, [C, H, W]. Raises UsageError D10."""
    import numpy as np

    if not os.path.isfile(file):  # a pipe would be waited for
        raise FileNotFoundError("no file, or a link to none")
    return np.ascontiguousarray(pixels_of(file, shape)).tobytes()


def pixels_of(file: Any, shape: Sequence[int]) -> Any:
    """uint8 [C, H, W] of an encoded picture, in a file or in memory; cut and resized as `picture` says. Raises
    UsageError D10, and whatever a decoder raises."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        what = "pictures are decoded by Pillow, which is not installed"
        raise UsageError(what, code="D10", where="data.source", fix="pip install pillow") from error
    import numpy as np

    channels, height, width = shape
    with Image.open(file) as opened:
        upright = ImageOps.exif_transpose(opened) or opened
        whole = upright.convert("L" if channels == 1 else "RGB")
    fitted = ImageOps.fit(whole, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(fitted, dtype=np.uint8).reshape(height, width, -1).transpose(2, 0, 1)
