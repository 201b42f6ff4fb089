"""Causes of wrong gradients whose parts are each wrong in another way: by a number for each part, or by rounding."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.verify.evidence import Cause, Evidence, box_of, ratio


def by_local_norms(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """Each part is the right one times a number, and these make all parts equally long: each is clipped alone."""
    groups: dict[
        str, tuple[float, float]
    ] = {}  # c, in few digits → (c, the squared norm of what it multiplies)
    for name in ev.want:
        for copies in ev.copies(name):
            want = box_of(ev.want[name], copies[0])
            if any(not copies[0].tensor.equal(p.tensor) for p in copies) or not bool(want.any()):
                return None
            c = ratio(copies[0].tensor.double(), want, ev.near)
            if c is None and not ev.is_right(copies[0], name):
                return None
            c = 1.0 if c is None else c
            _, squares = groups.get(f"{c:.5g}", (c, 0.0))
            groups[f"{c:.5g}"] = (c, squares + want.square().sum().item())
    lengths = [c * math.sqrt(squares) for c, squares in groups.values()]
    if len(lengths) < 2 or not all(
        math.isclose(
            x,
            lengths[0],
            rel_tol=max(1e-4, ev.near),  # torch adds 1e-6 to a norm
        )
        for x in lengths
    ):
        return None
    times = ", ".join(sorted(groups)[:4])
    text = (
        f"parts of the gradient are {times} times the right ones, and so each has the norm {lengths[0]:.4g}"
    )
    return Cause("partial_norm", f"{text}: each is clipped by its own norm, not by that of the whole model")


def rounding_noise(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """Most entries are off, in no direction, by as much of their terms as one rounding to a smaller dtype does."""
    gaps, wants, rates = [], [], []
    for name in names:
        got, want = ev.whole(name), ev.want[name]
        if got is None:
            return None
        terms = ev.shares[name].double().abs().sum(0) if name in ev.shares else want.abs()
        gap = got.double() - want
        gaps.append(gap.flatten())
        wants.append(want.flatten())
        rates.append((gap.abs() / terms.clamp_min(1e-3 * ev.top(name))).flatten())
    gap, want, rate = (torch.cat(x) for x in (gaps, wants, rates))
    worst = rate.max().item()
    if not 0 < worst < 0.02 or max(_alike(gap, want), _alike(gap, torch.ones_like(gap))) > 0.5:
        return None
    if (rate > worst / 1e3).double().mean() < 0.5:
        return None
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    steps = {word: torch.finfo(dtype).eps / 4 for word, dtype in dtypes.items()}
    word = min(steps, key=lambda w: abs(math.log2(worst / steps[w])))
    if abs(math.log2(worst / steps[word])) > 3:
        return None
    text = f"entries are off by up to {worst:.1e} of their terms, in no direction, as a sum in {word} is"
    return Cause("precision_lost", f"{text}: something is added up in {word} on the way")


def _alike(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two vectors, without its sign."""
    return abs((a @ b / (a.norm() * b.norm()).clamp_min(1e-300)).item())
