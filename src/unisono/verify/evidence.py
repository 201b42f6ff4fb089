"""Right gradients beside those that ranks hold, and least squares that find of which known tensors a wrong one is made.
The search for a cause in a proof uses it, and so does the one in a user's own loop."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from unisono.plan import Plan
from unisono.spec.words import listed

AXES = ("dp", "shard", "tp", "pp", "cp")
ROOM = 1 << 18  # rows of a regression: more would only make it slower


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause. name: stable, one of those in `docs/proof.md`. text: one sentence."""

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
    """Return c with got = c · want entry by entry; None if there is no such number, or it is 1."""
    at = int(want.abs().argmax())
    c = (got.flatten()[at] / want.flatten()[at]).item() if want.numel() else math.nan
    if not math.isfinite(c) or math.isclose(c, 1.0, rel_tol=slack):
        return None
    most = want.abs().max() * max(abs(c), slack)
    return c if bool(((got - c * want).abs() <= slack * most).all()) else None


def plan_sizes(plan: Plan, leaves: int) -> dict[str, int]:
    """Return the plan's sizes above one, by their names: of axes, of two axes together, micro-batches, ranks."""
    sizes = {axis: getattr(plan, axis) for axis in (*AXES, "ep") if getattr(plan, axis) > 1}
    for a, b in combinations(list(sizes), 2):
        sizes[f"{a}*{b}"] = sizes[a] * sizes[b]
    more = {"micros": plan.micros or 1, "micro-batches of the global batch": leaves, "world": plan.world}
    return sizes | {word: size for word, size in more.items() if size > 1}


def size_text(c: float, sizes: Mapping[str, int]) -> str:
    """Name the sizes that c or 1 / c is equal to; "" if there is none."""
    for shape, of in (("{}", c), ("1/{}", 1 / c if c else math.inf)):
        names = [word for word, size in sizes.items() if size > 1 and math.isclose(of, size, rel_tol=1e-4)]
        if names:
            return " or ".join(shape.format(f"{name} ({sizes[name]})") for name in names[:3])
    return ""


def factor(who: str, c: float, sizes: Mapping[str, int]) -> Cause:
    """Return the cause where all of `who` is multiplied by one number."""
    text = size_text(abs(c), sizes)
    if c < 0:
        times = f"{c:.6g} times the right one{f', as many as {text}' if text else ''}"
        return Cause("reversed", f"{who} {times}: it points the other way")
    if not text and abs(c - 1) < 0.01:
        near = "nothing is missing or counted twice; an epsilon, a norm or a count by which all are divided is off"
        return Cause("factor", f"{who} {c - 1:+.1e} off, all by the same share: {near}")
    about = f", as many as {text}" if text else ""
    return Cause("factor_of_axis" if text else "factor", f"{who} {c:.6g} times the right one{about}")


def axis_text(c: float, plan: Plan, leaves: int) -> str:
    """`size_text` with the sizes of a plan."""
    return size_text(c, plan_sizes(plan, leaves))


def lower_precision(x: Tensor, like: Tensor) -> str:
    """Return the smaller dtype to which x was rounded, where the right tensor, `like`, has other numbers; or ""."""
    for dtype, word in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")):
        if torch.finfo(dtype).bits >= torch.finfo(x.dtype).bits:
            return ""
        if torch.equal(x.to(dtype).to(x.dtype), x) and not torch.equal(like.to(dtype).to(like.dtype), like):
            return word
    return ""


@dataclass(frozen=True, slots=True)
class RecordedBox:
    """A box of a logical tensor as one rank holds it. at: axis → the rank's coordinate."""

    rank: int
    at: Mapping[str, int]
    start: tuple[int, ...]
    tensor: Tensor


def box_of(full: Tensor, part: RecordedBox) -> Tensor:
    """The view of `full` that a part covers."""
    for dim, (start, size) in enumerate(zip(part.start, part.tensor.shape, strict=True)):
        full = full.narrow(dim, start, size)
    return full


def copies_of(parts: Sequence[RecordedBox]) -> list[list[RecordedBox]]:
    """The boxes of a tensor that are not empty, each with all ranks that hold it."""
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[RecordedBox]] = defaultdict(list)
    for part in parts:
        if part.tensor.numel():
            boxes[part.start, tuple(part.tensor.shape)].append(part)
    return list(boxes.values())


def only_at(parts: Sequence[RecordedBox], axes: Sequence[str], wrong: Callable[[RecordedBox], bool]) -> str:
    """Name the places on one axis that alone have wrong parts, all of theirs; "" if there is no such axis."""
    bad, good = ([p.at for p in parts if wrong(p) is side] for side in (True, False))
    for axis in axes if bad and good else ():
        guilty = {at[axis] for at in bad}
        if not guilty & {at[axis] for at in good}:
            return f"{axis} {listed(sorted(guilty))}"
    return ""


def joined(parts: Sequence[RecordedBox], shape: Sequence[int]) -> Tensor | None:
    """The full tensor, each box from the first rank that holds it; None if a box is missing."""
    if not parts:
        return None
    full = torch.zeros(tuple(shape), dtype=parts[0].tensor.dtype)
    boxes = [copies[0] for copies in copies_of(parts)]
    for part in boxes:
        box_of(full, part).copy_(part.tensor)
    return full if sum(part.tensor.numel() for part in boxes) == full.numel() else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Right gradients, and the boxes of them that ranks hold.

    want: name → the right gradient, float64. held: name → its boxes. axes: those of a box's `at` that have more than
    one rank. sizes: in words → a number that a wrong factor may be. slack: relative to a tensor's largest entry, the
    error from which a box is wrong. shares: name → [shares, ...], which add up to the right gradient; `share` is what
    one is called. places: share → (ranks that compute it, its position there, how many they compute). past: gradients
    of the step before. ties: alias → owner of a weight under two names, whose shares are told apart.
    """

    want: Mapping[str, Tensor]
    held: Mapping[str, Sequence[RecordedBox]]
    axes: Sequence[str]
    sizes: Mapping[str, int]
    slack: float
    shares: Mapping[str, Tensor]
    share: str = "share"
    places: Mapping[int, tuple[str, int, int]] = field(default_factory=dict)
    past: Sequence[Mapping[str, Tensor]] = ()
    ties: Mapping[str, str] = field(default_factory=dict)

    @property
    def near(self) -> float:
        """Return the relative error up to which a tensor counts as equal to a formula."""
        return max(1e-9, 10 * self.slack)

    def top(self, name: str) -> float:
        """The largest entry of a right gradient."""
        return max(self.want[name].abs().max().item(), 1e-300) if self.want[name].numel() else 1e-300

    def whole(self, name: str) -> Tensor | None:
        """A gradient as ranks have it, in its own dtype."""
        return joined(self.held[name], self.want[name].shape)

    def copies(self, name: str) -> list[list[RecordedBox]]:
        """Return the boxes of a tensor, each with all ranks that hold it."""
        return copies_of(self.held[name])

    def gap(self, part: RecordedBox, name: str, factor: float = 1.0) -> float:
        """Largest error of a box, had the right gradient to be `factor` times as large; 1e308 if not a number."""
        gap = (part.tensor.double() - factor * box_of(self.want[name], part)).abs().max().item()
        return gap if math.isfinite(gap) else 1e308

    def is_right(self, part: RecordedBox, name: str) -> bool:
        """Whether a box is as it should be, but for rounding."""
        return self.gap(part, name) <= self.slack * self.top(name)

    def worst(self, name: str) -> float:
        """Largest error of any box."""
        return max((self.gap(p, name) for p in self.held[name] if p.tensor.numel()), default=0.0)

    def differ(self, name: str) -> list[RecordedBox]:
        """The copies of the first box whose ranks do not agree."""
        return next((b for b in self.copies(name) if any(not b[0].tensor.equal(p.tensor) for p in b)), [])

    def weights(self, names: Sequence[str], rank: int | None = None) -> list[float] | None:
        """How often each share is in all of `names` together, or in what one rank holds of them; None if these are not
        made of shares."""
        rows, columns, room = [], [], ROOM
        for name in names:
            shares = self._shares_of(name)
            parts = [p for p in self.held[name] if p.rank == rank and p.tensor.numel()]
            got = self.whole(name) if rank is None else parts[0].tensor if parts else None
            if shares is None or got is None or room < got.numel() // 2:
                continue
            if parts:
                shares = torch.stack([box_of(share, parts[0]) for share in shares])
            room -= got.numel()
            rows.append(got.double().flatten())
            columns.append(shares.flatten(1).T)
        if not rows:
            return None
        known = torch.cat(columns)
        adds = known.any(0)  # a micro-batch without a target adds nothing, however often it is there
        solution = fit(torch.cat(rows), known[:, adds])
        if solution is None or solution.residual > self.near:
            return None
        weights = torch.ones(len(adds), dtype=torch.float64)
        weights[adds] = torch.tensor(solution.weights, dtype=torch.float64)
        return weights.tolist()

    def _shares_of(self, name: str) -> Tensor | None:
        """[shares, ...] of one gradient; all uses of a tied weight together."""
        owner = self.ties.get(name, name)
        aliases = [alias for alias, other in self.ties.items() if other == owner]
        uses = [self.shares[use].double() for use in (owner, *aliases) if use in self.shares]
        return sum(uses[1:], uses[0]) if owner in self.shares else None
