"""The 1797 handwritten digits that scikit-learn carries: 8 x 8 pixels, 10 classes (Alpaydin, Kaynak, 1998)."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from unisono.spec.errors import UsageError
from unisono.train.data.dataset import Images
from unisono.train.data.order import sample_ids

_SPLIT_SEED = 0  # the same images are held out in every run, so that runs with different seeds compare


def digits(val_fraction: float) -> tuple[Images, Images]:
    """(training, validation): inputs float32 [n, 1, 8, 8] in 0..1, targets int64 [n] in 0..9.

    Raises UsageError D10 where scikit-learn is not installed.
    """
    with gzip.open(_file()) as stream:
        table = np.loadtxt(stream, delimiter=",", dtype=np.float32)
    table = table[sample_ids(_SPLIT_SEED, 0, len(table), len(table))]
    inputs = torch.from_numpy(table[:, :64].reshape(-1, 1, 8, 8) / np.float32(16))
    targets = torch.from_numpy(table[:, 64].astype(np.int64))
    cut = len(table) - int(len(table) * val_fraction)
    return Images(inputs[:cut], targets[:cut]), Images(inputs[cut:], targets[cut:])


def _file() -> Path:
    """Where scikit-learn keeps the table. Not imported: that takes a second and starts threads before a fork."""
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "the digits come with scikit-learn, which is not installed",
            code="D10",
            where="data.source",
            fix="pip install 'unisono[digits]'",
        )
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if not path.exists():
        raise UsageError(
            "this scikit-learn does not carry the digits where others do",
            code="D10",
            where=str(path),
            fix="pip install --upgrade 'unisono[digits]'",
        )
    return path
