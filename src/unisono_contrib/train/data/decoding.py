"""A process that decodes pictures: orders on stdin, answers on stdout, see `worker_pool`. No torch here."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from unisono.spec.errors import UsageError
from unisono.train.data.worker_pool import failure


def main() -> None:
    """Serve until stdin ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        try:
            answer = decoded(**json.loads(line))
        except (UsageError, OSError) as error:
            answer = failure(error)
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
    import numpy as np

    channels, height, width = shape
    whole = upright(file, channels)
    from PIL import Image, ImageOps

    fitted = ImageOps.fit(whole, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(fitted, dtype=np.uint8).reshape(height, width, -1).transpose(2, 0, 1)


def upright(file: Any, channels: int) -> Any:
    """A picture of PIL, as a camera says that it stands, of one channel or of three. Raises as `pixels_of`."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        what = "pictures are decoded by Pillow, which is not installed"
        raise UsageError(what, code="D10", where="data.source", fix="pip install pillow") from error
    with Image.open(file) as opened:
        turned = ImageOps.exif_transpose(opened) or opened
        return turned.convert("L" if channels == 1 else "RGB")
