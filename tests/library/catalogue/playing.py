"""What comes of a loop under a plan, in a word: equal, told CODE, refused CODE, raised, ended, or SILENT."""

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import torch

from tests.library.catalogue import PLANS, Loop, distance, on_ranks
from tests.threads import ThreadForkServer, context
from unisono.library.loop_check import ENTRY, LoopVerdict, Terms, playing
from unisono.plan import Plan
from unisono.spec.errors import UnisonoError
from unisono_contrib.comm.threads import WorldEnded, run

STEPS = 12  # more than any loop of the catalogue makes


@dataclass(frozen=True)
class Row:
    """said: equal, told J10, refused J02, raised TypeError, ended, alone raised TypeError (one process, too), SILENT.
    off: how far from one process. proof: what `unisono.prove` says of it, None where it was not asked."""

    loop: Loop
    plan: str
    said: str
    off: float = 0.0
    proof: LoopVerdict | str | None = None

    @property
    def silent(self) -> bool:
        return self.said == "SILENT"

    @property
    def was_silent(self) -> bool:
        return self.loop.expected(self.plan) == "silent"

    @property
    def healthy(self) -> bool:
        return self.loop.expected(self.plan) == "equal"

    @property
    def convicted(self) -> bool:
        """Whether the prover says no; a loop that cannot be played to its end has no other verdict."""
        return self.proof is not None and not (isinstance(self.proof, LoopVerdict) and self.proof.passed)

    @property
    def right(self) -> bool:
        """Whether the outcome is one that its class may have."""
        if self.healthy:
            return self.said == "equal" and not self.convicted
        return not self.silent or self.convicted

    def __str__(self) -> str:
        if not self.silent:
            return self.said
        return f"SILENT {self.off:.0e}, {'convicted' if self.convicted else 'NOT CONVICTED'}"


def rows(one: Loop, plans: list[str], prove: bool = True) -> list[Row]:
    """One loop under each plan, beside one process. prove: have the prover judge what is silent, and what is equal."""
    alone = _said(one, "dp=1", 1)
    found = []
    for plan in plans:
        if isinstance(alone, str):
            found.append(Row(one, plan, f"alone {alone}"))
            continue
        got = _said(one, plan, PLANS.get(plan) or Plan.parse(plan).world)
        row = Row(one, plan, got) if isinstance(got, str) else _compared(one, plan, alone[0], got)
        asks = prove and (row.silent or row.said == "equal")
        found.append(Row(one, plan, row.said, row.off, proof(one, plan)) if asks else row)
    return found


def _said(one: Loop, plan: str, size: int) -> Any:
    """The results of all ranks, or a word where there are none."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return [
                each[one.name]
                for each in run(size, lambda rank: on_ranks(context(rank, size), plan, [one]), join=False)
            ]
        except (WorldEnded, TimeoutError):
            return "ended"
        except UnisonoError as error:
            return f"refused {error.code}"
        except Exception as error:
            return f"raised {type(error).__name__}"
        finally:
            torch.set_default_dtype(torch.float32)


def _compared(one: Loop, plan: str, alone: dict[str, Any], ranks: list[dict[str, Any]]) -> Row:
    refused = sorted({str(rank["refused"]) for rank in ranks if "refused" in rank})
    if refused:
        return Row(one, plan, "refused " + " ".join(refused))
    for calls in zip(*(rank["noted"] for rank in ranks), strict=False):
        if len({*calls, ""}) > 2:
            return Row(one, plan, "ended")  # the watchdog ends it: a rank is elsewhere
    off = max(distance(alone, rank) for rank in ranks)
    if ranks[0]["told"]:
        return Row(one, plan, "told " + " ".join(ranks[0]["told"]), off)
    same = all(distance(ranks[0], rank) <= one.near for rank in ranks)
    return Row(one, plan, "equal" if same and off <= one.near else "SILENT", off)


def proof(one: Loop, plan: str) -> LoopVerdict | str:
    """The prover's verdict, or how its play ended."""
    call = {"module": one.function.__module__, "name": one.name, "file": __file__}
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            with playing(ThreadForkServer(ENTRY), call, Terms(STEPS, seed=3)) as verdict:  # type: ignore[arg-type]
                return verdict(Plan.parse(plan))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
