"""Small least squares: which mixture of known tensors is the observed one?"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from unisono.plan import Plan

AXES = ("dp", "shard", "tp", "pp", "cp")


@dataclass(frozen=True, slots=True)
class Cause:
    """name: stable, one of those that `cause.py` lists. text: one sentence."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Fit:
    """observed ≈ Σ weights · known. residual: of the largest observed or known entry."""

    weights: list[float]
    residual: float


def fit(observed: Tensor, known: Tensor) -> Fit | None:
    """observed [n], known [n, k] float64; None if the known ones cannot be told apart or there are too few numbers."""
    columns = known.shape[1]
    if len(observed) < 2 * columns or not bool(torch.isfinite(observed).all()):
        return None
    sizes = known.norm(dim=0)
    if bool((sizes == 0).any()):
        return None
    scaled = known / sizes
    values = torch.linalg.svdvals(scaled)
    if values[-1] < 1e-6 * values[0]:
        return None
    weights = torch.linalg.lstsq(scaled, observed[:, None], driver="gelsd").solution[:, 0] / sizes
    scale = max(observed.abs().max().item(), known.abs().max().item())
    residual = (known @ weights - observed).abs().max().item() / scale if scale else math.inf
    return Fit(weights.tolist(), residual)


def ratio(got: Tensor, want: Tensor, slack: float) -> float | None:
    """c with got = c · want entry by entry, or None."""
    at = int(want.abs().argmax())
    c = (got.flatten()[at] / want.flatten()[at]).item() if want.numel() else math.nan
    if not math.isfinite(c) or math.isclose(c, 1.0, rel_tol=slack):
        return None
    most = want.abs().max() * max(abs(c), slack)
    return c if bool(((got - c * want).abs() <= slack * most).all()) else None


def plan_sizes(plan: Plan, leaves: int) -> dict[str, int]:
    """In words → a size of the plan, or a product of two, or the micro-batches of a global batch; ones left out."""
    sizes = {axis: getattr(plan, axis) for axis in (*AXES, "ep") if getattr(plan, axis) > 1}
    for a, b in combinations(list(sizes), 2):
        sizes[f"{a}*{b}"] = sizes[a] * sizes[b]
    more = {"micros": plan.micros or 1, "micro-batches of the global batch": leaves, "world": plan.world}
    return sizes | {word: size for word, size in more.items() if size > 1}


def size_text(c: float, sizes: Mapping[str, int]) -> str:
    """Which of the sizes c, or 1 / c, is, in words; "" if none."""
    for shape, of in (("{}", c), ("1/{}", 1 / c if c else math.inf)):
        names = [word for word, size in sizes.items() if size > 1 and math.isclose(of, size, rel_tol=1e-4)]
        if names:
            return " or ".join(shape.format(f"{name} ({sizes[name]})") for name in names[:3])
    return ""


def factor(who: str, c: float, sizes: Mapping[str, int]) -> Cause:
    """All that is wrong is a number by which `who` is multiplied."""
    text = size_text(c, sizes)
    if not text and abs(c - 1) < 0.01:
        near = "nothing is missing or counted twice; an epsilon, a norm or a count by which all are divided is off"
        return Cause("factor", f"{who} {c - 1:+.1e} off, all by the same share: {near}")
    about = f", as many as {text}" if text else ""
    return Cause("factor_of_axis" if text else "factor", f"{who} {c:.6g} times the right one{about}")


def axis_text(c: float, plan: Plan, leaves: int) -> str:
    """`size_text` with the sizes of a plan."""
    return size_text(c, plan_sizes(plan, leaves))


def lower_precision(x: Tensor, like: Tensor) -> str:
    """The smaller dtype whose numbers all of x are, while `like`, the right tensor, is not of that dtype; or ""."""
    for dtype, word in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")):
        if torch.finfo(dtype).bits >= torch.finfo(x.dtype).bits:
            return ""
        if torch.equal(x.to(dtype).to(x.dtype), x) and not torch.equal(like.to(dtype).to(like.dtype), like):
            return word
    return ""
