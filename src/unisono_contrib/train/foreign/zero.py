"""DeepSpeed's checkpoints: the float32 weights that ZeRO dealt to ranks (stages 1 to 3), and universal ones.

ZeRO lays a group's weights end to end and deals that line out. Stages 1 and 2 cut the whole line (with padding at its
end); stage 3 cuts each weight, padded to whole parts (Rajbhandari et al., ZeRO, 2020).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.models.folder import unreadable
from unisono.models.weights import Shape, Weights, shape_of
from unisono.spec.words import whole
from unisono_contrib.train.foreign.inert import MadeWeights, held, saved, tensors_in

_STATES = "*zero_pp_rank_*_mp_rank_*_optim_states.pt"
Made = dict[str, tuple[Shape, Callable[[], Tensor]]]


def tag_of(folder: Path) -> Path:
    """The folder of one step: what `latest` names, or itself."""
    named = folder / "latest"
    try:
        inside = folder / named.read_text(encoding="utf-8").strip() if named.is_file() else folder
    except (OSError, UnicodeDecodeError):
        return folder
    return inside if inside.is_dir() else folder


def is_zero(folder: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed's."""
    inside = tag_of(folder)
    return (inside / "zero").is_dir() or any(inside.glob("*mp_rank_*_model_states.pt"))


def open_zero(folder: Path) -> Weights:
    """Float32 weights where there are some, else those in which it computed. Raises UsageError W01, W05."""
    inside = tag_of(folder)
    if (inside / "zero").is_dir():
        return MadeWeights(str(inside), dict(_universal(inside / "zero")))
    model_files = sorted(inside.glob("*mp_rank_*_model_states.pt"))
    if len({path.name.partition("mp_rank_")[2] for path in model_files}) > 1:
        raise unreadable(inside, ValueError("it is cut by tensor parallelism; convert it to a universal one"))
    about = saved(model_files[0])
    shards = sorted(inside.glob(_STATES), key=_number)
    if not shards:
        return held(str(inside), tensors_in(about["module"]))
    try:
        lengths = [path.stat().st_size for path in shards]
        return MadeWeights(str(inside), _gathered(about, [saved(path) for path in shards], lengths))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise unreadable(inside, ValueError(f"ZeRO's parts are not as documented ({error})")) from error


def _number(path: Path) -> int:
    """The rank in a file's name. Raises ValueError."""
    rank = whole(path.name.partition("zero_pp_rank_")[2].partition("_")[0])
    if rank is None:
        raise ValueError(f"{path.name} is of no rank")
    return rank


def _universal(folder: Path) -> Iterator[tuple[str, tuple[Shape, Callable[[], Tensor]]]]:
    """A folder a weight, with its float32 values in a file."""
    for path in sorted(folder.glob("*/fp32.pt")):
        tree = saved(path)
        tensor = tree["param"] if isinstance(tree, Mapping) else tree
        yield path.parent.name, (tuple(tensor.shape), partial(_universal_one, path))


def _universal_one(path: Path) -> Tensor:
    tree = saved(path)
    return tree["param"] if isinstance(tree, Mapping) else tree


def _gathered(about: Mapping[str, Any], shards: list[Any], lengths: list[int]) -> Made:
    """lengths: of the files of the shards, in bytes."""
    states = [shard["optimizer_state_dict"] for shard in shards]
    stage = states[0]["zero_stage"]
    stage = int(stage.arguments[0]) if hasattr(stage, "arguments") else int(stage)  # an enum of its own
    tensors: Made = {}
    if stage <= 2:
        groups = [state["single_partition_of_fp32_groups"] for state in states]
        for number, shapes in enumerate(about["param_shapes"]):
            line = [group[number] for group in groups]
            at = 0
            for name, shape in _each_once(shapes, tensors):
                tensors[name] = shape, partial(_of_line, line, at, shape)
                at += prod(shape)
            if at > sum(part.numel() for part in line):
                raise ValueError("a group's line is too short")
    else:
        groups = [state["fp32_flat_groups"] for state in states]
        lines = [_in_a_row(group, most) for group, most in zip(groups, lengths, strict=True)]
        at = 0
        for name, shape in (pair for shapes in about["param_shapes"] for pair in _each_once(shapes, tensors)):
            part = -(-prod(shape) // len(lines))
            tensors[name] = shape, partial(_of_parts, lines, at, part, shape)
            at += part
        if at > lines[0].numel():
            raise ValueError("a rank's line is too short")
    buffers = tensors_in(about.get("module", {}))
    for name in about.get("buffer_names", ()):
        if name in buffers:
            tensors[name] = tuple(buffers[name].shape), partial(buffers.__getitem__, name)
    for alias, owner in dict(about.get("shared_params") or {}).items():
        tensors.setdefault(alias, tensors[owner])
    return tensors


def _each_once(shapes: Mapping[str, Any], tensors: Made) -> Iterator[tuple[str, Shape]]:
    """The shapes of weights that are not there yet. Raises ValueError: a few bytes may name the same ones again."""
    for name, shape in shapes.items():
        if name in tensors:
            raise ValueError(f"{name} is there twice")
        yield name, shape_of(shape)


def _in_a_row(parts: Any, most: int) -> Tensor:
    """Flat tensors end to end. Raises ValueError for more bytes than `most`: a file may name one of them many times."""
    parts = [parts] if isinstance(parts, Tensor) else list(parts)
    if sum(part.nbytes for part in parts) > most:
        raise ValueError("its tensors have more bytes than its file")
    return _end_to_end(parts)


def _end_to_end(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _of_line(line: list[Tensor], at: int, shape: Shape) -> Tensor:
    """`prod(shape)` numbers from `at` on of a line that lies in parts."""
    want, first, parts = prod(shape), 0, []
    for part in line:
        begin, end = max(at, first), min(at + want, first + part.numel())
        if begin < end:
            parts.append(part[begin - first : end - first])
        first += part.numel()
    return _end_to_end(parts).view(shape)


def _of_parts(lines: list[Tensor], at: int, part: int, shape: Shape) -> Tensor:
    """A weight of which each rank has a part that begins at `at`."""
    return torch.cat([line[at : at + part] for line in lines])[: prod(shape)].view(shape)
