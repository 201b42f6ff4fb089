"""`unisono.check_gradients`: are the gradients of a hand-written parallel loop those of one device?"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate

from unisono.launch.fork_server import ForkServer
from unisono.library.explain import explained
from unisono.library.found import found
from unisono.spec.errors import UsageError
from unisono.verify.user import GradientVerdict, judge

ENTRY = "unisono.library.gradient_check_rank:main"
SCRIPT = "__unisono_script__"  # what a script is called when ranks import it


class Rank(Protocol):
    """What a parallel function is told: its rank and how many there are. torch.distributed is initialised (Gloo)."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...


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
) -> GradientVerdict:
    """Run `candidate(rank)` on `ranks` processes and hold its gradients to those of `reference()` in one.

    reference: returns {name: gradient}, or a list of such shares of the batch that add up to the gradient; shares let
    the verdict say which of them are missing or counted twice. candidate: returns {name: gradient} as this rank has
    it; `rank` has `rank` and `world`. Both are module-level functions, found again by name in new processes, which
    start with `torch.manual_seed(0)`, one thread and `dtype` as torch's default dtype.

    DTensors (FSDP2, tensor parallel) are gathered. layout: name or pattern → `Shard(dim)` or `Partial()` of
    torch.distributed.tensor, for plain tensors that are pieces, or parts of a sum, on `shards` consecutive ranks (all,
    if None). tokens: how many terms (samples, or samples times positions) a weight's gradient adds up.

    Raises UsageError V03 where names, shapes or functions do not fit, UserCodeError when one of the functions raises.
    """
    with ForkServer(ENTRY, path=path_of(reference)) as nursery:
        terms = GradientCheck(ranks, layout or {}, shards or ranks, dtype, tokens, timeout)
        return check_with(nursery, reference, candidate, terms)


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """As the arguments of `check_gradients`."""

    ranks: int = 2
    layout: Mapping[str, Placement] = field(default_factory=dict)
    shards: int = 2
    dtype: str = "float64"
    tokens: int = 4096
    timeout: float = 300.0


def check_with(
    nursery: ForkServer,
    reference: Callable[[], Gradients | Sequence[Gradients]],
    candidate: Callable[[Any], Gradients],
    terms: GradientCheck,
) -> GradientVerdict:
    """`check_gradients` on processes forked from a nursery of this module's ENTRY, which may serve several calls."""
    ranks = terms.ranks
    if ranks < 1 or ranks % terms.shards:
        raise _misfit(
            f"{ranks} ranks do not divide into groups of {terms.shards}", "shards that divide ranks"
        )
    with tempfile.TemporaryDirectory(prefix="unisono-check-") as name:
        call = {"dtype": terms.dtype, "folder": name}
        (one,) = run(nursery, {**call, **home_of(reference), "alone": True}, 1, terms.timeout)
        told = run(nursery, {**call, **home_of(candidate), "alone": False}, ranks, terms.timeout)
        parts = [load_file(Path(name) / f"part-{i:04d}") for i in range(one["parts"])]
        seen = [load_file(Path(name) / f"rank-{i:04d}") for i in range(ranks)]
    gathered: dict[str, Placement] = dict.fromkeys(
        (key for result in told for key in result["cut"]), Replicate()
    )
    ordered = [{key: part[key] for key in one["order"] if key in part} for part in parts]
    return judge(ordered, seen, {**gathered, **terms.layout}, terms.shards, terms.tokens)


def path_of(function: Callable[..., Any]) -> list[str]:
    """Modules that this process can import, its own processes can."""
    return [str(Path(home_of(function)["file"]).parent), *(entry for entry in sys.path if entry)]


def run(nursery: ForkServer, argument: dict[str, Any], ranks: int, timeout: float) -> list[dict[str, Any]]:
    """What each rank returned. Raises what the first to fail raised."""
    outcome = nursery.run(argument, ranks, 1, None, timeout, "gloo")
    if outcome.error is not None:
        if outcome.error.trace:
            outcome.error.add_note(outcome.error.trace)
            outcome.error.add_note(outcome.error.render())
        raise outcome.error
    if outcome.stopped:
        raise KeyboardInterrupt
    return [result or {} for result in outcome.results]


def home_of(function: Callable[..., Any]) -> dict[str, str]:
    """Where another process finds the function. Raises UsageError V03."""
    file, name = found(function, "check_gradients", SCRIPT, inner=True)
    return {"module": getattr(function, "__module__", ""), "name": name, "file": str(file)}


def _misfit(what: str, fix: str) -> UsageError:
    return UsageError(what, where="check_gradients", fix=fix, code="V03")
