"""One file of `torch.save`: a Lightning checkpoint, or a plain dictionary of weights."""

from collections.abc import Mapping
from pathlib import Path

from unisono.models.folder import unreadable
from unisono.models.weights import Weights
from unisono_contrib.train.foreign.assembled import held
from unisono_contrib.train.foreign.inert import saved, tensors_in

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
_UNDER = ("state_dict", "model_state_dict", "model", "module")  # Lightning's first


def open_torch_file(path: Path) -> Weights:
    """The weights in it. Raises UsageError W01, W05."""
    tree = saved(path)
    inner = next((tree[key] for key in _UNDER if isinstance(tree, Mapping) and key in tree), tree)
    tensors = tensors_in(inner)
    if not tensors:
        raise unreadable(path, ValueError("it holds no dictionary of tensors; was a whole module saved?"))
    return held(str(path), tensors)
