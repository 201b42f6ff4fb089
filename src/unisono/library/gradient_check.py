"""`unisono.check_gradients`: are the gradients of a hand-written parallel loop those of one device?

**The bound** is that of `verify/bounds.py` for a model whose layers are cut, since we cannot know what the code cuts:
relative to the tensor's largest entry, lambda * sqrt(path) * u * sqrt(tokens) and the sum over ranks. `path`, the
additions on the longest way through the model, is estimated from the gradients themselves: a matrix [out, in] stands
for a linear layer that adds `in` numbers forward and `out` backward; a vector, for two passes of a normalisation.
"""

import inspect
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from unisono.launch.fork_server import ForkServer
from unisono.launch.loop import OnEvent
from unisono.library.explain import explained
from unisono.plan import Plan
from unisono.spec.errors import UsageError, VerifyMismatch
from unisono.spec.words import listed
from unisono.verify.bounds import BoundTerms, bounds_of
from unisono.verify.evidence import Evidence, RecordedBox
from unisono.verify.gradients import explain

ENTRY = "unisono.library.proof_rank:main"
SCRIPT = "__unisono_script__"  # what a script is called when ranks import it
PLAYS = "unisono-prove-"
"""How the names of temporary folders begin in which scripts are played."""
_PRECISION = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"
}  # fmt: skip
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class GradientVerdict:
    """What came of a comparison. errors: name → largest error over the tensor's largest entry, in the model's order.

    bound: what each may be. first: the first wrong tensor in backward order. cause: a stable name, explanation: one
    sentence; all three None if nothing is wrong. updates, update_bound: the same for how weights moved, where that was
    compared, relative to the tensor's largest movement. step: which was the first wrong one, counted from 0; None for a
    comparison of one step.
    """

    passed: bool
    bound: float
    errors: Mapping[str, float]
    first: str | None = None
    cause: str | None = None
    explanation: str | None = None
    updates: Mapping[str, float] = field(default_factory=dict)
    update_bound: float = 0.0
    step: int | None = None

    def __bool__(self) -> bool:
        return self.passed

    @property
    def what(self) -> str:
        """What is wrong, or was compared: "gradients" or "updates"."""
        return "updates" if self._wrong_updates() or not self.errors else "gradients"

    @property
    def worst(self) -> str | None:
        """The tensor with the largest error, of what is wrong."""
        errors = self.updates if self.what == "updates" else self.errors
        return max(errors, key=lambda name: errors[name], default=None)

    def _wrong_updates(self) -> list[str]:
        gradients = [name for name, error in self.errors.items() if not error <= self.bound]
        return [] if gradients else [n for n, error in self.updates.items() if not error <= self.update_bound]

    def __str__(self) -> str:
        compared = (("gradients", self.errors, self.bound), ("updates", self.updates, self.update_bound))
        if self.passed:
            seen = [
                f"{len(errors)} {what}, largest error {max(errors.values()):.1e} (bound {bound:.1e})"
                for what, errors, bound in compared
                if errors
            ]
            return f"ok: {'; '.join(seen)}"
        _, errors, bound = compared[self.what == "updates"]
        error = errors.get(self.first or "")
        size = "" if error is None else f", error {error:.1e} (bound {bound:.1e})"
        at = "" if self.step is None else f" in step {self.step}, the {self.what[:-1]} of"
        return f"WRONG: first{at} {self.first}{size}; likely: {self.explanation} ({self.cause})"

    def check(self) -> None:
        """Raises VerifyMismatch V01 if anything is wrong."""
        if not self.passed:
            raise VerifyMismatch(
                f"the parallel {self.what} are not those of one device",
                where=f"first in backward: {self.first}",
                likely=self.explanation or "",
            )


Gradients = Mapping[str, Tensor]


@explained()
def check_gradients(
    reference: Callable[[], Gradients | Sequence[Gradients]],
    candidate: Callable[[Any], Gradients],
    *,
    ranks: int = 2,
    layout: Mapping[str, Placement] | None = None,
    shards: int | None = None,
    dtype: str = "float64",
    tokens: int = 4096,
    timeout: float = 300.0,
    meets: int | None = None,
) -> GradientVerdict:
    """Compare the gradients of a parallel loop with those of one device. The verdict is true if they agree.

    Both functions are module-level: new processes find them by name, and start with `torch.manual_seed(0)`, one thread
    and `dtype` as torch's default dtype. torch.distributed is initialised with Gloo. DTensors (FSDP2, tensor parallel)
    are gathered.

    reference: returns {name: gradient} of one device, or a list of such mappings, one per share of the batch, that add
    up to the gradient; with shares the verdict can say which are missing or counted twice. candidate: takes a rank with
    `rank` and `world`, and returns {name: gradient} of that rank. ranks: how many processes run the candidate. layout:
    name or pattern → `Shard(dim)` or `Partial()` of torch.distributed.tensor, for plain tensors that are pieces, or
    terms of a sum, on consecutive ranks. shards: how many consecutive ranks hold one tensor; all if None. dtype:
    torch's default dtype in both functions. tokens: how many terms (samples, or samples times positions) a weight's
    gradient sums. timeout: seconds for each function. meets: how often a gradient may be summed over ranks in what the
    candidate does; if None, nobody counts.

    Raises UsageError V03 where names, shapes or functions do not fit, UserCodeError when one of the functions raises.
    """
    with ForkServer(ENTRY, path=path_of(reference)) as server:
        return check_on(server, reference, candidate, ranks, layout, shards, dtype, tokens, timeout, meets)


def check_on(
    server: ForkServer,
    reference: Callable[[], Gradients | Sequence[Gradients]],
    candidate: Callable[[Any], Gradients],
    ranks: int = 2,
    layout: Mapping[str, Placement] | None = None,
    shards: int | None = None,
    dtype: str = "float64",
    tokens: int = 4096,
    timeout: float = 300.0,
    meets: int | None = None,
) -> GradientVerdict:
    """Do as `check_gradients` on processes forked from a fork server of this module's ENTRY."""
    shards = shards or ranks
    if ranks < 1 or ranks % shards:
        raise _misfit(f"{ranks} ranks do not divide into groups of {shards}", "shards that divide ranks")
    with tempfile.TemporaryDirectory(prefix="unisono-check-") as name:
        call = {"dtype": dtype, "folder": name, "seed": 0}
        alone = {**call, **home_of(reference), "alone": True}
        (reference_play,) = run(server, alone, 1, timeout)
        counted = {**call, **home_of(candidate), "alone": False, "counts": meets is not None}
        results = run(server, counted, ranks, timeout)
        parts = [load_file(Path(name) / f"part-{i:04d}") for i in range(reference_play["parts"])]
        seen = [load_file(Path(name) / f"rank-{i:04d}") for i in range(ranks)]
        gathered: dict[str, Placement] = dict.fromkeys(
            (key for result in results for key in result["cut"]), Replicate()
        )
        ordered = [{key: part[key] for key in reference_play["order"] if key in part} for part in parts]
        cut = {**gathered, **(layout or {})}
        verdict = judge(ordered, seen, cut, shards, tokens)
        if verdict.cause == "gradient":  # in no pattern: perhaps another forward
            (tries,) = run(server, {**alone, "suppose": ranks}, 1, timeout)
            for number, text in enumerate(tries["texts"]):
                like = load_file(Path(name) / f"supposed-{number:04d}")
                if judge([{key: like[key] for key in reference_play["order"]}], seen, cut, shards, tokens):
                    text = f"{text}, as where each rank adds it before a sum: one device makes the same then"
                    return replace(verdict, cause="bias_added_by_each_rank", explanation=text)
    return verdict if meets is None else _counted(verdict, ordered[0], results, meets)


def _counted(
    verdict: GradientVerdict, like: Gradients, results: Sequence[Mapping[str, Any]], meets: int
) -> GradientVerdict:
    """A right gradient that was summed over ranks more often than `meets` is a wrong loop too."""
    times = max(result["summed"] for result in results) / max(1, sum(x.numel() for x in like.values()))
    if not verdict.passed or times < meets + 0.5:
        return verdict
    text = (
        f"each gradient is right, but crosses between ranks {times:.3g} times, not {meets}: "
        "what should wait for the last micro-batch does not"
    )
    return replace(
        verdict, passed=False, cause="summed_too_often", explanation=text, first=next(reversed(list(like)))
    )


def path_of(function: Callable[..., Any]) -> list[str]:
    """Return the path on which the processes find what this one can import."""
    return [str(Path(home_of(function)["file"]).parent), *(entry for entry in sys.path if entry)]


def run(
    nursery: ForkServer, argument: dict[str, Any], ranks: int, timeout: float, hear: OnEvent | None = None
) -> list[dict[str, Any]]:
    """Return what each rank returned. Raises what the first to fail raised, and KeyboardInterrupt for Ctrl-C."""
    outcome = nursery.run(argument, ranks, 1, hear, timeout, "gloo")
    if outcome.stopped and outcome.error is None:
        raise KeyboardInterrupt
    return outcome.returned()


def home_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return where another process finds the function. Raises UsageError V03."""
    file, name = locate(function, "check_gradients", SCRIPT, inner=True)
    return {"module": getattr(function, "__module__", ""), "name": name, "file": str(file)}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put in front: `module.` of DDP, `_orig_mod.` of torch.compile."""
    for word in _WRAPPERS:
        name = name.removeprefix(word).replace("." + word, ".")
    return name


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return {name: gradient} of a model after backward, zeros where there is none. DTensors stay DTensors."""
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
    places: Mapping[int, tuple[str, int, int]] | None = None,
    past: Sequence[Gradients] = (),
    inside: torch.dtype = torch.float64,
) -> GradientVerdict:
    """parts: shares of the right gradient, which add up to it. seen: each rank's tensors. layout: name or pattern →
    how a tensor lies on `shards` consecutive ranks. tokens: terms that a weight's gradient sums up. places, past: as of
    `Evidence`. inside: the coarsest dtype that a gradient passes on its way.

    Raises UsageError V03 for names or shapes that do not go together.
    """
    order = list(dict.fromkeys(name for part in parts for name in part))
    want = {n: torch.stack([part[n].double() for part in parts if n in part]).sum(0) for n in order}
    _check_names(want, seen)
    bound = _bound(want, seen, tokens, inside)
    evidence = Evidence(
        want=want,
        held={name: _boxes(name, want[name], seen, layout, shards) for name in want},
        axes=("rank",),
        sizes=_sizes(len(seen), len(parts), shards),
        slack=bound,
        shares={n: torch.stack([part[n] for part in parts]) for n in want if all(n in part for part in parts)}
        if len(parts) > 1
        else {},
        share="share" if places is None else "micro-batch",
        places=places or {},
        past=past,
    )
    largest = max((x.abs().max().item() for x in want.values() if x.numel()), default=0.0)
    errors = {n: evidence.worst(n) / max(evidence.top(n), bound * largest) for n in want}
    wrong = [name for name in reversed(want) if not errors[name] <= bound]
    if not wrong:
        return GradientVerdict(True, bound, errors)
    cause = explain(evidence, wrong)
    return GradientVerdict(False, bound, errors, wrong[0], cause.name, cause.text)


def _check_names(want: Mapping[str, Tensor], seen: Sequence[Mapping[str, Tensor]]) -> None:
    """Raises UsageError V03."""
    for rank, held in enumerate(seen):
        lost, new = want.keys() - held.keys(), held.keys() - want.keys()
        for problem, names in (("lacks", lost), ("alone has", new)):
            if names:
                what = f"rank {rank} {problem} {listed(sorted(names), 3)}"
                raise _misfit(what, "the names of the reference, for all parameters")


def _boxes(
    name: str,
    right: Tensor,
    seen: Sequence[Mapping[str, Tensor]],
    layout: Mapping[str, Placement],
    shards: int,
) -> list[RecordedBox]:
    """What each rank holds of one gradient; of parts of a sum, the sum. Raises UsageError V03."""
    placed = next((p for pattern, p in layout.items() if fnmatchcase(name, pattern)), Replicate())
    boxes = []
    for first in range(0, len(seen), shards):
        group = [held[name] for held in seen[first : first + shards]]
        if isinstance(placed, Partial):
            group = [torch.stack(group).sum(0)] * shards
        starts, wholes = [[0] * x.dim() for x in group], group
        if isinstance(placed, Shard):
            wholes, ends = [torch.cat(group, placed.dim)], accumulate(x.shape[placed.dim] for x in group)
            for start, end in zip(starts[1:], ends, strict=False):
                start[placed.dim] = end
        for whole in wholes:
            if whole.shape != right.shape:
                raise _misfit(
                    f"{name} is {list(whole.shape)} on {shards} ranks and {list(right.shape)} on one device",
                    f'layout={{"{name}": Shard(dim)}} says how it is cut',
                )
        for rank, (start, x) in enumerate(zip(starts, group, strict=True), first):
            boxes.append(RecordedBox(rank, {"rank": rank}, tuple(start), x))
    return boxes


def _sizes(ranks: int, parts: int, shards: int) -> dict[str, int]:
    """Return the factors by which a gradient may be too large or too small, by their names."""
    replicas = ranks // shards
    return {
        "the ranks": ranks,
        "the shares of the batch": parts,
        "the ranks of one replica": shards,
        "the replicas": replicas,
        "the shares of one replica": parts // replicas,
        "the shares of one rank": parts // ranks,
    }


def _bound(
    want: Mapping[str, Tensor], seen: Sequence[Mapping[str, Tensor]], tokens: int, inside: torch.dtype
) -> float:
    shapes = [tuple(x.shape) for x in want.values()]
    path = sum(s[0] + math.prod(s[1:]) if len(s) > 1 else 4 * math.prod(s) for s in shapes)
    dtypes = {inside, *(x.dtype for held in seen for x in held.values())}
    coarse = max(
        (d for d in dtypes if d in _PRECISION), key=lambda d: torch.finfo(d).eps, default=torch.float64
    )
    sizes = BoundTerms(
        path=path,
        rounded=2 * sum(len(s) > 1 for s in shapes),
        elements=sum(math.prod(s) for s in shapes),
        tokens=tokens,
        leaves=len(seen),
    )
    # tp: what a rank computes may be cut anywhere, so bounds are those of cut layers.
    return bounds_of(Plan(tp=max(2, len(seen)), precision=_PRECISION[coarse]), sizes).grad


def _misfit(what: str, fix: str) -> UsageError:
    return UsageError(what, where="check_gradients", fix=fix, code="V03")


def locate(
    function: Callable[..., Any], asker: str, module_prefix: str, *, inner: bool = False
) -> tuple[Path, str]:
    """Return a function's file and its name there. module_prefix: with which the names of modules begin that our own
    processes make of such files. inner: whether a function inside a class will do. Raises UsageError V03, which names
    the `asker`."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if module.startswith(module_prefix):
        raise UsageError(
            f"{asker.rpartition('.')[2]} was called while its own processes import the script",
            where=asker,
            fix="put the call under: if __name__ == '__main__':",
            code="V03",
        )
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    there = bool(name) and "<" not in name if inner else name.isidentifier()
    if not there or file is None or not Path(file).exists():
        raise UsageError(
            f"{name or function!r} cannot be found by another process",
            where=asker,
            fix="a function at the top of a file, neither a lambda nor inside another function",
            code="V03",
        )
    return Path(file).resolve(), name
