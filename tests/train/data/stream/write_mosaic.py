"""Write the shards of `mosaic/` by mosaicml-streaming itself, of which the tests hold what we read:

    python tests/train/data/stream/write_mosaic.py tests/train/data/stream/mosaic

with an interpreter that has mosaicml-streaming (these are of 0.13.0).
"""

import sys
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

WAYS = {"plain": None, "zstd": "zstd", "zstd7": "zstd:7", "gz": "gz", "bz2": "bz2"}
COUNT = 12


def text(number: int) -> str:
    """A document of uneven length, not all of it ASCII."""
    return f"<{number}> " + "größer " * (number % 5)


def png(number: int) -> bytes:
    """A picture whose first pixels say its number."""
    pixels = np.zeros((6, 6, 3), np.uint8)
    pixels[0, 0] = number, 0, 7
    body = BytesIO()
    Image.fromarray(pixels).save(body, "PNG")
    return body.getvalue()


def main(out: Path) -> None:
    """A folder for each way to compress, of texts and of pictures, in several shards each."""
    from streaming import MDSWriter

    for name, compression in WAYS.items():
        columns = {"text": "str", "weight": "float32", "meta": "json", "id": "uint16"}
        texts = MDSWriter(
            out=str(out / f"text-{name}"), columns=columns, compression=compression, size_limit=600
        )
        with texts as writer:
            for i in range(COUNT):
                writer.write({"text": text(i), "weight": np.float32(i), "meta": {"i": i}, "id": np.uint16(i)})
    for name in ("plain", "zstd"):
        columns = {"label": "int", "image": "png", "name": "str", "index": "str_int"}
        pictures = MDSWriter(
            out=str(out / f"pictures-{name}"), columns=columns, compression=WAYS[name], size_limit=900
        )
        with pictures as writer:
            for i in range(COUNT):
                with Image.open(BytesIO(png(i))) as image:
                    writer.write({"label": i % 4, "image": image, "name": f"n{i}", "index": i})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
