"""Random tensors, random exact cuts of them, and a save of all ranks from one process."""

import torch
from hypothesis import strategies as st

from unisono.train.state.checkpoint import Box, save

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def make(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def cut(draw, shape):
    """A random exact tiling: a box is cut at a random place along a random dim, a few times."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        low = tuple(at if d == dim else n for d, n in enumerate(size))
        high = tuple(n - at if d == dim else n for d, n in enumerate(size))
        boxes += [(start, low), (tuple(s + at * (d == dim) for d, s in enumerate(start)), high)]
    return boxes


def view(full, start, size):
    return full[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]


@st.composite
def worlds(draw):
    """(name -> tensor, (layout saved, layout wanted)); a layout is a list of (name, start, size) per rank."""
    tensors = {}
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        tensors[f"model/t{index}"] = make(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    layouts = []
    for _ in range(2):
        ranks = [[] for _ in range(draw(st.integers(1, 4)))]
        for name, full in tensors.items():
            for start, size in cut(draw, full.shape):
                ranks[draw(st.integers(0, len(ranks) - 1))].append((name, start, size))
        layouts.append(ranks)
    return tensors, layouts


def save_all(run_dir, step, tensors, ranks, state, token="t", **more):
    """Each rank's save in turn from this one process, rank 0 last."""
    folder = None
    for rank in reversed(range(len(ranks))):
        pieces = [Box(n, tuple(tensors[n].shape), a, view(tensors[n], a, s)) for n, a, s in ranks[rank]]
        options = {"rank": rank, "world": len(ranks), "token": token, "wait": False, "patience": 5} | more
        folder = save(run_dir, step, pieces, state, **options)
    return folder


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
