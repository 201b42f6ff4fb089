"""Weights that others wrote, in the forms in which they write them. Nothing of what is read is ever run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from unisono.models.folder import SafetensorsWeights, has_weights, open_folder, unreadable
from unisono.models.weights import Shape, Weights
from unisono.spec.errors import UsageError
from unisono.spec.finder import sister
from unisono.spec.frames import is_memory
from unisono.spec.runs import CHECKPOINTS, newest_saved
from unisono.train.state.checkpoint import Box, latest, load
from unisono.train.state.checkpoint.read import MODEL, parameters_of
from unisono.train.state.checkpoint.tensorfile import DTYPES

Form = tuple[Callable[[Path], bool], Callable[[Path], Weights]]


def _is_own(path: Path) -> bool:
    is_one = (path / CHECKPOINTS).is_dir() or (path.is_dir() and path.parent.name == CHECKPOINTS)
    return is_one or newest_saved(path) is not None


class _OwnWeights(Weights):
    """The parameters of a checkpoint of ours, of the latest of a run, or of that of the newest run in a folder of runs;
    every byte is verified as it is read."""

    def __init__(self, folder: Path) -> None:
        folder = newest_saved(folder) or folder
        checkpoint = folder if folder.parent.name == CHECKPOINTS else latest(folder)
        if checkpoint is None:
            raise unreadable(folder, ValueError("the run has no checkpoint"))
        self.where, self._folder = str(checkpoint), checkpoint
        entries = parameters_of(checkpoint)
        self.shapes = {name: tuple(entry.shape) for name, entry in entries.items()}
        self._dtypes = {name: DTYPES[entry.dtype] for name, entry in entries.items()}

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        out = torch.empty(shape, dtype=self._dtypes[name])
        load(self._folder, [Box(MODEL + name, self.shapes[name], start, out)])
        return out


FORMS: tuple[Form, ...] = (
    (lambda p: p.is_file() and p.suffix == ".safetensors", lambda p: SafetensorsWeights([p], str(p))),
    (has_weights, open_folder),
    (_is_own, _OwnWeights),
)
"""Each form as (whether a path has it, how it is opened); the sister package has those of other frameworks."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """While it lasts, whatever goes wrong is raised as a file that cannot be read."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UsageError) or is_memory(error):
            raise
        raise unreadable(path, error) from error


class _CheckedWeights(Weights):
    """Weights of others; whatever is wrong with them is raised as a file that cannot be read."""

    def __init__(self, inner: Weights) -> None:
        self.where, self.shapes, self._inner = inner.where, inner.shapes, inner
        for name, shape in self.shapes.items():
            if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{str(name)[:80]} has no shape")

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        with reading(Path(self.where)):
            tensor = self._inner.box(name, start, shape)
            if tuple(tensor.shape) != tuple(shape):
                raise ValueError(f"{name} has another shape than is said")
            return tensor


def open_weights(path: str | Path) -> Weights:
    """The weights at a path, whatever wrote them. Raises UsageError: W01 unreadable, W05 refused, K01 damaged."""
    where = Path(path)
    if not where.exists():
        raise unreadable(where, FileNotFoundError())
    with reading(where):
        for has_form, opened in (*FORMS, *getattr(sister(__name__), "FORMS", ())):
            if has_form(where):
                return _CheckedWeights(opened(where))
    raise unreadable(where, ValueError("it holds no weights in a form that is known here"))
