"""Weights that others wrote, in the forms in which they write them. Nothing of what is read is ever run."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from unisono.models.folder import SafetensorsWeights, has_weights, open_folder, unreadable
from unisono.models.weights import Shape, Weights
from unisono.spec.runs import CHECKPOINTS
from unisono.train.foreign.dcp import DcpWeights, is_dcp
from unisono.train.foreign.inert import told
from unisono.train.foreign.megatron import is_megatron, open_megatron
from unisono.train.foreign.own import open_own
from unisono.train.foreign.torchfile import SUFFIXES, open_torch_file
from unisono.train.foreign.zero import is_zero, open_zero


def _is_own(path: Path) -> bool:
    return (path / CHECKPOINTS).is_dir() or (path.is_dir() and path.parent.name == CHECKPOINTS)


FORMS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Weights]], ...] = (
    (lambda p: p.is_file() and p.suffix == ".safetensors", lambda p: SafetensorsWeights([p], str(p))),
    (lambda p: p.is_file() and p.suffix in SUFFIXES, open_torch_file),
    (has_weights, open_folder),
    (_is_own, open_own),
    (is_dcp, DcpWeights),
    (is_zero, open_zero),
    (is_megatron, open_megatron),
)


class _ToldWeights(Weights):
    """Weights of others; whatever is wrong with them is told as a file that cannot be read."""

    def __init__(self, inner: Weights) -> None:
        self.where, self.shapes, self._inner = inner.where, inner.shapes, inner
        for name, shape in self.shapes.items():
            if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{str(name)[:80]} has no shape")

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        with told(Path(self.where)):
            found = self._inner.box(name, start, shape)
            if tuple(found.shape) != tuple(shape):
                raise ValueError(f"{name} has another shape than is said")
            return found


def open_weights(path: str | Path) -> Weights:
    """The weights at a path, whatever wrote them. Raises UsageError: W01 unreadable, W05 refused, K01 damaged."""
    where = Path(path)
    if not where.exists():
        raise unreadable(where, FileNotFoundError())
    with told(where):
        for known, opened in FORMS:
            if known(where):
                return _ToldWeights(opened(where))
    raise unreadable(where, ValueError("it holds no weights in a form that is known here"))
