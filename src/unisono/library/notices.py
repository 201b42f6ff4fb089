"""What makes several ranks compute something else than one device, noticed before the first update.

Each kind has a code and a remedy. It stands in `job.notes`, rank 0 prints it once, and `init(strict=True)` raises it.
Ranks put what they noticed together at the first updates, so that all of them stop or none.
"""

import sys

from unisono.library.exchange import ScalarExchange
from unisono.spec.errors import Problem, UsageError

KINDS = (
    Problem(
        "J10",
        "the loss is no mean over the samples at hand, so the ranks' means do not make up that of the global batch",
        fix="job.weigh(count) if it is a mean over other things; else the loss of outputs = job.gather(outputs)",
    ),
    Problem(
        "J11",
        "batches are fetched ahead and copied, so that nothing says which of them a forward computes on",
        fix="job.weigh(len(x)) right before the forward, or batches that the ranks divide",
    ),
    Problem(
        "J12",
        "the script draws random numbers between batches: each rank draws its own, one device would draw others",
        fix="job.generator.randn(*x.shape), .rand or .randint: the same numbers for a sample on any number of ranks",
    ),
    Problem(
        "J13",
        "the model draws random numbers (dropout, say): each rank draws its own, one device would draw others",
        fix="nothing if it is dropout; else draw in the loop by job.generator and give the model the numbers",
    ),
    Problem(
        "J14",
        "the model's forward moves buffers, and each rank moves them by its own samples",
        fix="after the forward: buffer.copy_(job.mean(buffer)), or let the forward see job.gather(x)",
    ),
    Problem(
        "J15",
        "something else than the optimisers still holds the parameters that sharding has replaced",
        fix="make it from model.parameters() after job.prepare",
    ),
    Problem(
        "J16",
        "the script draws from Python's or NumPy's random numbers, or a generator of its own, between batches: "
        "all ranks draw the same",
        fix="as it is for choices that all samples share; else job.generator",
    ),
    Problem(
        "J26",
        "gradients that no backward has made met as means, and are no sums over samples, or it is not known",
        fix="loss.backward(), and what is not linear in gradients after it; unisono prove says whether it is right",
    ),
    Problem(
        "J27",
        "a hook on gradients inside the graph is not linear: each rank's sees the gradients of its own samples",
        fix="do it in the forward to each sample alone, or after backward to the parameters' gradients",
    ),
    Problem(
        "J30",
        "ranks computed in different ways after the script had read a number of its own part of the batch",
        fix="read the number of all ranks: job.mean(x), job.ranks.max(x)",
    ),
    Problem(
        "J31",
        "the loss passes an autograd function of the script's own, which is not read",
        fix="unisono prove SCRIPT says whether the loop is right",
    ),
)


class Notices:
    """Collect what was noticed on this rank and, after `settle`, on any. Call it with a code and the place."""

    def __init__(self, exchange: ScalarExchange, strict: bool) -> None:
        self._exchange, self._strict = exchange, strict
        self.said: dict[str, str] = {}
        self._noticed: dict[str, str] = {}

    def __call__(self, code: str, detail: str = "") -> None:
        self._noticed.setdefault(code, detail)

    def settle(self) -> None:
        """Put together what the ranks noticed, and say what is new. Every rank calls it, or it hangs. Raises UsageError
        if the job is strict."""
        mask = sum(1 << i for i, kind in enumerate(KINDS) if kind.code in self._noticed)
        for seen in self._exchange.gather(mask):
            mask |= seen
        for i, kind in enumerate(KINDS):
            if mask >> i & 1 and kind.code not in self.said:
                self._say(kind, self._noticed.get(kind.code, "on another rank"))

    def _say(self, kind: Problem, detail: str) -> None:
        if self._strict:
            raise UsageError(kind.what, where=detail, fix=kind.fix, code=kind.code)
        self.said[kind.code] = (
            f"U-{kind.code}: {kind.what}" + (f" ({detail})" if detail else "") + f"; {kind.fix}"
        )
        if self._exchange.group.index == 0:
            print(f"note {self.said[kind.code]}", file=sys.stderr)
