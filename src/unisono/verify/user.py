"""Gradients of code that knows nothing of us, put together from its ranks and held to those of one device.

**The bound** is that of `bounds.py` for a model whose layers are cut, since we cannot know what the code cuts:
relative to the tensor's largest entry, lambda * sqrt(path) * u * sqrt(tokens) and the sum over ranks. `path`, the
additions on the longest way through the model, is estimated from the gradients themselves: a matrix [out, in] stands
for a linear layer that adds `in` numbers forward and `out` backward; a vector, for two passes of a normalisation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from unisono.plan import Plan
from unisono.spec.errors import UsageError, VerifyMismatch
from unisono.verify.bounds import BoundTerms, bounds_of
from unisono.verify.solve import fit, listed, lower_precision, ratio

_PRECISION = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"
}  # fmt: skip
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class GradientVerdict:
    """What came of a comparison. errors: name → largest error over the tensor's largest entry, in the model's order.

    bound: what each may be. first: the first wrong tensor in backward order. cause: a stable name, explanation: one
    sentence; all three None if nothing is wrong.
    """

    passed: bool
    bound: float
    errors: Mapping[str, float]
    first: str | None = None
    cause: str | None = None
    explanation: str | None = None

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        worst = max(self.errors.values(), default=0.0)
        if self.passed:
            return f"ok: {len(self.errors)} gradients, largest error {worst:.1e} (bound {self.bound:.1e})"
        error = self.errors.get(self.first or "")
        size = "" if error is None else f", error {error:.1e} (bound {self.bound:.1e})"
        return f"WRONG: first {self.first}{size}; likely: {self.explanation} ({self.cause})"

    def check(self) -> None:
        """Raises VerifyMismatch V01 if anything is wrong."""
        if not self.passed:
            raise VerifyMismatch(
                "the parallel gradients are not those of one device",
                where=f"first in backward: {self.first}",
                likely=self.explanation or "",
            )


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put in front: `module.` of DDP, `_orig_mod.` of torch.compile."""
    for word in _WRAPPERS:
        name = name.removeprefix(word).replace("." + word, ".")
    return name


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """name → gradient of a model after backward, zeros where there is none; DTensors stay DTensors."""
    return {
        plain_name(name): torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def judge(
    parts: Sequence[Mapping[str, Tensor]],
    seen: Sequence[Mapping[str, Tensor]],
    layout: Mapping[str, Placement],
    shards: int,
    tokens: int,
) -> GradientVerdict:
    """parts: shares of the right gradient, which add up to it. seen: each rank's tensors. layout: name or pattern →
    how a tensor lies on `shards` consecutive ranks. tokens: terms that a weight's gradient sums up.

    Raises UsageError V03 for names or shapes that do not go together.
    """
    want = {name: _sum([part[name] for part in parts if name in part]) for name in _names(parts)}
    case = _Case(parts, want, seen, layout, shards, _bound(want, seen, len(seen), tokens))
    case.check_names()
    largest = max((x.abs().max().item() for x in want.values() if x.numel()), default=0.0)
    errors = {}
    for name, right in want.items():
        scale = max(right.abs().max().item() if right.numel() else 0.0, case.bound * largest) or 1.0
        errors[name] = max(
            (_gap(copy, right) / scale for copy in case.copies(name) if right.numel()), default=0.0
        )
    wrong = [name for name in reversed(want) if not errors[name] <= case.bound]
    if not wrong:
        return GradientVerdict(True, case.bound, errors)
    cause, text = case.explain(wrong)
    return GradientVerdict(False, case.bound, errors, wrong[0], cause, text)


def _names(parts: Sequence[Mapping[str, Tensor]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _sum(shares: Sequence[Tensor]) -> Tensor:
    return torch.stack([share.double() for share in shares]).sum(0)


def _gap(copy: Tensor, right: Tensor) -> float:
    gap = (copy.double() - right).abs().max().item()
    return gap if math.isfinite(gap) else 1e308


def _bound(
    want: Mapping[str, Tensor], seen: Sequence[Mapping[str, Tensor]], ranks: int, tokens: int
) -> float:
    shapes = [tuple(x.shape) for x in want.values()]
    path = sum(s[0] + math.prod(s[1:]) if len(s) > 1 else 4 * math.prod(s) for s in shapes)
    dtypes = {x.dtype for held in seen for x in held.values()}
    coarse = max(
        (d for d in dtypes if d in _PRECISION), key=lambda d: torch.finfo(d).eps, default=torch.float64
    )
    sizes = BoundTerms(
        path=path,
        rounded=2 * sum(len(s) > 1 for s in shapes),
        elements=sum(math.prod(s) for s in shapes),
        tokens=tokens,
        leaves=ranks,
    )
    # tp: what a rank computes may be cut anywhere, so bounds are those of cut layers.
    return bounds_of(Plan(tp=max(2, ranks), precision=_PRECISION[coarse]), sizes).grad


@dataclass(frozen=True, slots=True)
class _Case:
    parts: Sequence[Mapping[str, Tensor]]
    want: Mapping[str, Tensor]
    seen: Sequence[Mapping[str, Tensor]]
    layout: Mapping[str, Placement]
    shards: int
    bound: float

    @property
    def slack(self) -> float:
        return max(1e-9, 10 * self.bound)

    def placement(self, name: str) -> Placement:
        found = [p for pattern, p in self.layout.items() if fnmatchcase(name, pattern)]
        return found[0] if found else Replicate()

    def copies(self, name: str) -> list[Tensor]:
        """The tensor as each group of `shards` ranks has it, or each rank where all hold the whole; float64."""
        held = [rank[name].double() for rank in self.seen]
        placed = self.placement(name)
        groups = [held[i : i + self.shards] for i in range(0, len(held), self.shards)]
        if isinstance(placed, Shard):
            return [torch.cat(group, placed.dim) for group in groups]
        return [torch.stack(group).sum(0) for group in groups] if isinstance(placed, Partial) else held

    def check_names(self) -> None:
        """Raises UsageError V03."""
        for rank, held in enumerate(self.seen):
            lost, new = self.want.keys() - held.keys(), held.keys() - self.want.keys()
            for problem, names in (("lacks", lost), ("alone has", new)):
                if names:
                    shown = listed(sorted(names), 3)
                    raise _misfit(
                        f"rank {rank} {problem} {shown}", "the names of the reference, for all parameters"
                    )
        for name, right in self.want.items():
            for copy in self.copies(name):
                if copy.shape != right.shape:
                    raise _misfit(
                        f"{name} is {list(copy.shape)} on {self.shards} ranks and {list(right.shape)} on one device",
                        f'layout={{"{name}": Shard(dim)}} says how it is cut',
                    )

    def explain(self, wrong: Sequence[str]) -> tuple[str, str]:
        """(cause, one sentence)."""
        for find in (
            self._nothing,
            self._kept_apart,
            self._factor,
            self._shares,
            self._rank,
            self._precision,
            self._order,
        ):
            found = find(wrong)
            if found is not None:
                return found
        name = wrong[0]
        apart = (self.copies(name)[0] - self.want[name]).abs()
        count = int((apart > self.bound * self.want[name].abs().max()).sum())
        return "gradient", f"{count} of {apart.numel()} entries of {name} are wrong, in no pattern known here"

    def _nothing(self, wrong: Sequence[str]) -> tuple[str, str] | None:
        bad = [n for n in wrong if not all(bool(torch.isfinite(c).all()) for c in self.copies(n))]
        if bad:
            return "not_a_number", f"{bad[0]} is not a number"
        zero = [n for n in wrong if not any(bool(c.any()) for c in self.copies(n))]
        return ("missing_share", f"{_many(zero)} zero on all ranks") if zero == list(wrong) else None

    def _kept_apart(self, wrong: Sequence[str]) -> tuple[str, str] | None:
        """Each rank kept its own: their sum or mean is right."""
        for how, weigh in (("sum", 1.0), ("mean", None)):
            done = []
            for name in wrong:
                copies = self.copies(name)
                if len(copies) > 1 and not all(torch.equal(c, copies[0]) for c in copies):
                    total = torch.stack(copies).sum(0) * (weigh or 1 / len(copies))
                    if _gap(total, self.want[name]) <= self.slack * self.want[name].abs().max().item():
                        done.append(name)
            if done and len(done) == len(wrong) and not self._partly_met(wrong):
                return (
                    "not_reduced",
                    f"{_many(done)} not reduced: each rank keeps its own, and their {how} is right",
                )
        return None

    def _factor(self, wrong: Sequence[str]) -> tuple[str, str] | None:
        found = {ratio(c, self.want[n], self.slack) for n in wrong for c in self.copies(n)}
        if None in found or not found:
            return None
        factors = sorted(c for c in found if c is not None)
        c = factors[0]
        if not math.isclose(c, factors[-1], rel_tol=1e-4):
            return None
        sizes = {
            "the ranks": len(self.seen),
            "the shares of the batch": len(self.parts),
            "the ranks of one replica": self.shards if self.shards < len(self.seen) else 1,
        }
        replicas = len(self.seen) // self.shards
        sizes |= {"the replicas": replicas, "the shares of one replica": len(self.parts) // replicas}
        sizes["the shares of one rank"] = len(self.parts) // len(self.seen)
        words = [f"{word} ({n})" for word, n in sizes.items() if n > 1 and math.isclose(c, n, rel_tol=1e-4)]
        words += [
            f"1/{word} ({n})" for word, n in sizes.items() if n > 1 and math.isclose(1 / c, n, rel_tol=1e-4)
        ]
        who = "every gradient is" if len(wrong) == len(self.want) else _many(wrong)
        about = f", as many as {' or '.join(words[:3])}" if words else ""
        return ("factor_of_axis" if words else "factor"), f"{who} {c:.6g} times the right one{about}"

    def _shares(self, wrong: Sequence[str]) -> tuple[str, str] | None:
        """Which shares of the batch are in what each rank has?"""
        if len(self.parts) < 2:
            return None
        names = self._in_all_shares(wrong)
        for i in range(min((len(self.copies(n)) for n in names), default=0)):
            found = self._fit(names, i)
            if found is None:
                continue
            lost = [k for k, w in enumerate(found) if abs(w) < 1e-3]
            other = [(k, w) for k, w in enumerate(found) if abs(w) >= 1e-3 and abs(w - 1) > 1e-3]
            if lost or other:
                said = [f"share {listed(lost)} of the batch is missing"] * bool(lost)
                said += [f"share {k} counts {w:.4g} times" for k, w in other[:3]]
                whose = "" if len(self.copies(names[0])) == 1 else f" on rank {i * self._step(names[0])}"
                cause = "missing_micro_batch" if lost else "counted_twice" if other[0][1] > 1 else "factor"
                return cause, f"in {_many(names, verb=False)}{whose} {', '.join(said)}"
        return None

    def _in_all_shares(self, wrong: Sequence[str]) -> list[str]:
        return [n for n in wrong if all(n in part for part in self.parts)]

    def _fit(self, names: Sequence[str], copy: int) -> list[float] | None:
        """The weight of each share of the batch in one copy, if it is made of shares at all."""
        known = torch.stack(
            [torch.cat([part[n].double().flatten() for n in names]) for part in self.parts], 1
        )
        found = fit(torch.cat([self.copies(n)[copy].flatten() for n in names]), known)
        return None if found is None or found.residual > self.slack else found.weights

    def _partly_met(self, wrong: Sequence[str]) -> bool:
        """Whether two copies hold a share of the batch in common."""
        names = self._in_all_shares(wrong)
        if len(self.parts) < 2 or not names:
            return False
        both = [self._fit(names, i) for i in (0, 1)]
        return all(w is not None for w in both) and any(
            abs(a) > 1e-3 and abs(b) > 1e-3 for a, b in zip(*[w or [] for w in both], strict=True)
        )

    def _step(self, name: str) -> int:
        return 1 if isinstance(self.placement(name), Replicate) else self.shards

    def _rank(self, wrong: Sequence[str]) -> tuple[str, str] | None:
        """Only some ranks, or some ranks' pieces, are wrong."""
        name = wrong[0]
        right, top = self.want[name], self.want[name].abs().max().item()
        placed = self.placement(name)
        if isinstance(placed, Partial):
            return None
        bad = []
        for rank, held in enumerate(self.seen):
            piece = right
            if isinstance(placed, Shard):
                sizes = [r[name].shape[placed.dim] for r in self.seen[: self.shards]]
                piece = right.split(sizes, placed.dim)[rank % self.shards]
            if _gap(held[name], piece) > self.bound * top:
                bad.append(rank)
        if not bad or len(bad) == len(self.seen):
            return None
        cause = "rank_slice" if isinstance(placed, Shard) else "replicas_drifted"
        return cause, f"{name} is wrong on ranks {listed(bad)} alone"

    def _precision(self, wrong: Sequence[str]) -> tuple[str, str] | None:
        for name in wrong:
            held = self.seen[0][name]
            word = lower_precision(held.double(), self.want[name]) if held.dtype == torch.float64 else ""
            if word:
                return (
                    "precision_lost",
                    f"all entries of {name} are {word} numbers: it was rounded on its way",
                )
        return None

    def _order(self, wrong: Sequence[str]) -> tuple[str, str] | None:
        for name in wrong:
            got, right = self.copies(name)[0].flatten(), self.want[name].flatten()
            room = self.slack * right.abs().max().item()
            if got.numel() > 1 and _gap(got.sort().values, right.sort().values) <= room:
                return "permuted", f"the entries of {name} are right but stand elsewhere"
        return None


def _misfit(what: str, fix: str) -> UsageError:
    return UsageError(what, where="check_gradients", fix=fix, code="V03")


def _many(names: Sequence[str], verb: bool = True) -> str:
    if len(names) == 1:
        return f"the gradient of {names[0]}" + (" is" if verb else "")
    return f"the gradients of {names[0]} and {len(names) - 1} more" + (" are" if verb else "")
