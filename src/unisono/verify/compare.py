"""One step of a plan beside the reference's: everything that leaves its bound, in the order of a step.

data → initial parameters → losses → gradients, last layer first → norm → clipping → parameters and moments → buffers.
What comes first is where the mistake is; what follows is mostly its consequence.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unisono.config import TrainConfig
from unisono.verify import averages
from unisono.verify.evidence import RecordedBox
from unisono.verify.laws import clip_factor, first_state, observed_after, update
from unisono.verify.record import Note, Record
from unisono.verify.room import CompareTerms, GradientRoom, largest_of

CONTRACT = ("loss", "grad", "param", "optim")
KIND_OF = {
    "init": "param",
    "raw": "grad",
    "grad": "grad",
    "model": "param",
    "optim": "optim",
    "ema": "optim",
    "buffer": "param",
}

ParamState = tuple[Tensor, dict[str, Tensor]]  # a parameter and its moments
Tolerance = Callable[[str, Tensor], Tensor]  # (key, the right tensor) → absolute, of each entry


@dataclass(frozen=True, slots=True)
class Divergence:
    """One thing that is not as it should be.

    kind: data init loss copies missing raw norm grad lr model optim ema buffer law. error: relative to the tensor's
    largest entry, or infinite where there is nothing to divide. ranks: who disagrees, where copies do.
    """

    step: int
    kind: str
    name: str
    error: float
    what: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"step {self.step + 1}: {self.what}"


@dataclass(slots=True)
class Judgement:
    """The result of comparing one step. errors: by the contract's kinds, the largest relative error."""

    errors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CONTRACT, 0.0))
    bit_identical: bool = True
    divergences: list[Divergence] = field(default_factory=list)


def judge(terms: CompareTerms, step: int, ref: Record, before: Record | None, seen: Record) -> Judgement:
    """Compare one step. before: the reference's record of the step before, None at step 0."""
    out = Judgement()
    look = _Step(terms, step, ref, before, seen, out)
    inputs, passes = (look.data, look.init), (look.losses, look.raw, look.norm, look.clipped)
    for part in (*inputs, *passes, look.updated, look.buffers):
        out.divergences.extend(part())
    return out


@dataclass(slots=True)
class _Step:
    terms: CompareTerms
    step: int
    ref: Record
    before: Record | None
    seen: Record
    out: Judgement
    room: "GradientRoom" = field(init=False)

    def __post_init__(self) -> None:
        self.room = GradientRoom.beside(self.terms, self.ref)

    # What went in ------------------------------------------------------------------------------------------------

    def data(self) -> Iterator[Divergence]:
        """Each leaf once, with the samples, inputs and targets that it has on one device."""
        ours, theirs = self.seen.leaves(), self.ref.leaves()
        for first in sorted(ours.keys() | theirs.keys()):
            name = f"the leaf at sample {first}"
            if first not in theirs:
                yield self._say("data", name, math.inf, f"{name} does not belong to this step")
            elif first not in ours:
                yield self._say("data", name, math.inf, f"{name} is computed by nobody")
            elif len(ours[first]) > 1:
                yield self._say("data", name, math.inf, f"{name} is computed {len(ours[first])} times")
            else:
                mine, other = ours[first][0], theirs[first][0]
                for key in ("samples", "inputs", "targets", "count"):
                    if mine[key] != other[key]:
                        yield self._say("data", name, math.inf, f"{name} has other {key}")
        for note in self.seen.notes:
            for leaf in note.leaves:
                twin = theirs.get(leaf["first"])
                if twin and any(
                    leaf[key] != twin[0][key] for key in ("samples", "inputs", "targets", "count")
                ):
                    what = f"rank {note.rank} reads another leaf at sample {leaf['first']}"
                    yield self._say("data", what, math.inf, what, (note.rank,))

    def init(self) -> Iterator[Divergence]:
        """Initial parameters have the same bits under every plan."""
        if self.step == 0:
            yield from self._tensors("init", lambda key, want: torch.zeros(()))

    # Forward -----------------------------------------------------------------------------------------------------

    def losses(self) -> Iterator[Divergence]:
        """Losses of each leaf, and of the step, which is the same on all ranks."""
        ours, theirs = self.seen.leaves(), self.ref.leaves()
        for first in sorted(ours.keys() & theirs.keys()):
            for leaf in ours[first]:
                name, twin = f"loss of the leaf at sample {first}", theirs[first][0]
                room = self.terms.bounds.loss, twin["size"]
                yield from self._number("loss", name, leaf["loss"], twin["loss"], *room)
        want, steps = self.ref.notes[0].loss, self.terms.rhythm + (0 if self.step else self.terms.lag)
        size = math.fsum(leaf["size"] for leaf in self.ref.notes[0].leaves) / steps
        for note in self.seen.notes:
            leaves = max(1, len(theirs))
            bound = self.terms.bounds.loss + (0.0 if self.terms.exact else self.terms.bounds.total(leaves))
            yield from self._number("loss", "loss of the step", note.loss, want, bound, size, note)

    # Backward ----------------------------------------------------------------------------------------------------

    def raw(self) -> Iterator[Divergence]:
        """Gradients before clipping, in the order in which backward makes them."""
        tolerance = self.room.of
        yield from self._tensors(
            "raw", lambda key, want: torch.tensor(tolerance(key), dtype=torch.float64), backward=True
        )

    def norm(self) -> Iterator[Divergence]:
        """The reported norm: against the reference's, and against the gradients that the plan really had."""
        want, bound = self.ref.notes[0].norm, self.room.of_norm()
        for note in self.seen.notes:
            yield from self._number("norm", "norm of the gradient", note.norm, want, bound, note=note)

    def clipped(self) -> Iterator[Divergence]:
        """Gradients after clipping: against the reference's, and against raw ones times the factor."""
        factor = clip_factor(self.ref.notes[0].norm, self.terms.train.clip)
        relative = self.room.of_norm() + 8 * self.terms.bounds.unit

        def tolerance(key: str, want: Tensor) -> Tensor:
            raw = self.room.of(key.replace("grad/", "raw/", 1))
            return raw * factor * (1 + relative) + want.double().abs() * relative

        yield from self._tensors("grad", tolerance, backward=True)
        factor_applied = clip_factor(self.seen.notes[0].norm, self.terms.train.clip)
        for key in self.seen.names("grad"):
            got, raw = self.seen.whole(key), self.seen.whole(key.replace("grad/", "raw/", 1))
            if got is None or raw is None or not self.seen.notes[0].finite:
                continue
            right = raw.double() * factor_applied
            yield from self._law(key, got, right, right.abs() * 8 * self.terms.bounds.unit, "clipping")

    # Update ------------------------------------------------------------------------------------------------------

    def updated(self) -> Iterator[Divergence]:
        """Learning rate, moments, parameters: against the reference's, and against the optimiser's own formula."""
        for note in self.seen.notes:
            want = self.ref.notes[0].lr
            yield from self._number("lr", "learning rate", note.lr, want, self.room.of_rate(), note=note)
            if not note.finite and self.ref.notes[0].finite:
                what = f"loss or norm of rank {note.rank} is not a number"
                yield self._say("loss", what, math.inf, what, (note.rank,))
        relative = self.room.of_norm() + 8 * self.terms.bounds.unit
        parted = [name for name in self.ref.names("model") if not self._same(name)]
        bounds = {
            key: b for name in parted for key, (_, b) in self._formula(name, self.ref, relative).items()
        }

        def tolerance(key: str, want: Tensor) -> Tensor:
            return bounds.get(key, self.terms.bounds.grad * want.double().abs().max())

        yield from self._tensors("optim", tolerance)
        yield from self._tensors("model", tolerance)
        for name in parted:
            if name.partition("/")[2] not in self.terms.owners:
                for key, (right, bound) in self._formula(name, self.seen, None).items():
                    got = self.seen.whole(key)
                    if got is not None:
                        yield from self._law(key, got, right, bound, "update")
        share = self.terms.average_step(self.step + 1)
        yield from self._tensors("ema", averages.tolerance_of(share, self.ref, tolerance))
        for key, got, right, bound in averages.laws(share, self.ref, self.before, self.seen):
            yield from self._law(key, got, right, bound, "average", "weights")

    def _same(self, model_key: str) -> bool:
        """Whether a parameter and its moments have the reference's bits: then no formula has to be asked."""
        keys = [model_key, *self.ref.moments(model_key.partition("/")[2])]
        pairs = [(self.seen.whole(key), self.ref.whole(key)) for key in keys]
        return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)

    def _formula(
        self, model_key: str, source: Record, relative: float | None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """key → (value, tolerance) after the update, from the gradients of `source`, whose clipping is right to
        `relative`; None: as if these gradients were exact."""
        name = model_key.partition("/")[2]
        grad = source.whole(f"grad/{name}")
        state = state_before(self.terms.train, self.ref, self.before, name)
        if grad is None or state is None:
            return {}
        error: Tensor | float = 0.0
        if relative is not None:
            factor = clip_factor(self.ref.notes[0].norm, self.terms.train.clip)
            raw = self.room.of(f"raw/{name}")
            error = raw * factor * (1 + relative) + grad.double().abs() * relative
        sizes = {"lr": source.notes[0].lr, "step": self.step, "unit": self.terms.bounds.unit}
        how = {"lazy": name in self.terms.lazy, "keep": self.terms.kept(name, self.step), "name": name}
        room = 0.0 if relative is None else self.terms.bounds.observed
        how["observed"] = observed_after(self.terms.train, source, name, room)
        out = update(self.terms.train, *state, grad, error, **sizes, **how)
        if relative is not None and (rate := self.room.of_rate()):  # a step is as long as its rate
            value, bound = out["param"]
            out["param"] = (value, bound + rate * (value - state[0].double()).abs())
        return {f"model/{name}" if k == "param" else f"optim/{name}/{k}": value for k, value in out.items()}

    def buffers(self) -> Iterator[Divergence]:
        """Buffers after the step."""
        yield from self._tensors("buffer", self._of_buffer)

    def _of_buffer(self, _: str, want: Tensor) -> Tensor:
        if not want.is_floating_point():
            return torch.tensor(self.terms.bounds.vote, dtype=torch.float64)
        return self.terms.bounds.grad * want.double().abs().max()

    # Tools -------------------------------------------------------------------------------------------------------

    def _tensors(self, kind: str, tolerance: Tolerance, backward: bool = False) -> Iterator[Divergence]:
        keys = [key for key in self.ref.shapes if key.startswith(f"{kind}/") and key in self.ref.parts]
        ordered: Sequence[str] = list(reversed(keys)) if backward else keys
        for key in ordered:
            if _owner(key, self.terms.owners) != key and key not in self.seen.parts:
                continue
            yield from self._tensor(kind, key, tolerance)
        for key in self.seen.names(kind):
            if key not in self.ref.parts:
                yield from self._tensor(kind, key, tolerance)

    def _tensor(self, kind: str, key: str, tolerance: Tolerance) -> Iterator[Divergence]:
        copies = self.seen.copies(key)
        for ranks in copies:
            yield from self._agree(kind, key, ranks)
        owner = _owner(key, self.terms.owners)
        want, got = self.ref.whole(owner), self.seen.whole(key)
        if want is None and kind in ("raw", "grad") and got is not None and not got.any():
            return  # an absent gradient is a zero one
        if want is None or got is None:
            side = "one device" if want is None else "the plan"
            self._note(kind, math.inf)
            yield self._say("missing", key, math.inf, f"{key}, or a part of it, is missing under {side}")
            return
        if torch.equal(got, want):
            return
        error, entry = _apart(got, want)
        room, gap = tolerance(owner, want), (got.double() - want.double()).abs()
        over, bounds = gap > room, self.terms.bounds
        if (kind == "raw" and bounds.grad) or (kind == "grad" and bounds.lost):
            # As the bound counts: of a tensor that is next to nothing, over the model's largest; so no figure that is
            # right is above the bound beside it.
            self._note(kind, bounds.grad * (gap / room).max().item())
        else:
            self._note(kind, error)
        if self.terms.exact or bool(over.any()) or not math.isfinite(error):
            wrong = (
                f"{int(over.sum())} of {over.numel()} entries outside"
                if bool(over.any())
                else "not the same bits"
            )
            yield self._say(
                kind, key, error, f"{key} is off by {error:.1e} of its largest entry at {entry}; {wrong}"
            )

    def _agree(self, kind: str, key: str, ranks: Sequence[RecordedBox]) -> Iterator[Divergence]:
        first = ranks[0]
        others = [p for p in ranks[1:] if not torch.equal(p.tensor, first.tensor)]
        if others:
            error, _ = _apart(others[0].tensor, first.tensor)
            self._note(kind, error)
            apart = (first.rank, *(p.rank for p in others))
            what = f"{key} differs between ranks {', '.join(map(str, apart))} by {error:.1e} of its largest entry"
            yield self._say("copies", key, error, what, apart)

    def _number(
        self,
        kind: str,
        name: str,
        got: float,
        want: float,
        bound: float,
        size: float = 0.0,
        note: Note | None = None,
    ) -> Iterator[Divergence]:
        """size: how large what the number is a sum of is, by which its error counts where it is larger."""
        if got == want:
            return
        scale = max(abs(want), size)
        error = abs(got - want) / scale if scale else math.inf
        error = math.inf if error != error else error
        self.out.bit_identical = False
        if kind == "loss":
            self.out.errors["loss"] = max(self.out.errors["loss"], error)
        if error > bound:
            where = "" if note is None else f" on rank {note.rank}"
            what = f"{name}{where} is {got:.9g} instead of {want:.9g}"
            yield self._say(kind, name, error, what, () if note is None else (note.rank,))

    def _law(
        self, key: str, got: Tensor, right: Tensor, bound: Tensor, law: str, of: str = "gradient"
    ) -> Iterator[Divergence]:
        over = (got.double() - right).abs() > bound
        want = self.ref.whole(key)
        if bool(over.any()) and (want is None or not torch.equal(got, want)):
            error, entry = _apart(got, right)
            what = f"{key} does not follow from the plan's own {of}: {law} is off by {error:.1e} at {entry}"
            yield self._say("law", key, error, what)

    def _note(self, kind: str, error: float) -> None:
        self.out.bit_identical = False
        name = KIND_OF[kind]
        self.out.errors[name] = max(self.out.errors[name], error)

    def _say(self, kind: str, name: str, error: float, what: str, ranks: tuple[int, ...] = ()) -> Divergence:
        if kind in ("data", "missing", "copies"):
            self.out.bit_identical = False
        return Divergence(self.step, kind, name, error, what, ranks)


def state_before(train: TrainConfig, ref: Record, before: Record | None, name: str) -> ParamState | None:
    """Return the reference's parameter and moments before a step: those after the last step, or the initial ones."""
    last, kind = (ref, "init") if before is None else (before, "model")
    if (param := last.whole(f"{kind}/{name}")) is None:
        return None
    wholes = {key.rpartition("/")[2]: last.whole(key) for key in last.moments(name)}
    moments = {key: value for key, value in wholes.items() if value is not None}
    return param, first_state(train, name, param) if before is None and moments else moments


def _owner(key: str, owners: Mapping[str, str]) -> str:
    kind, _, name = key.partition("/")
    if name in owners:
        return f"{kind}/{owners[name]}"
    head, _, last = name.rpartition("/")
    return f"{kind}/{owners[head]}/{last}" if head in owners else key


def _apart(a: Tensor, b: Tensor) -> tuple[float, list[int]]:
    """(largest |a - b| over the largest |b|, where)."""
    gap = (a.double() - b.double()).abs()
    flat = int(gap.argmax())
    entry = [int(i) for i in torch.unravel_index(torch.tensor(flat), gap.shape)] if gap.dim() else []
    scale, worst = largest_of(b), gap.max().item()
    error = worst / scale if scale else math.inf
    return (math.inf if error != error else error), entry
