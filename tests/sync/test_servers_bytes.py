"""Bytes that servers move: those of a run's ledger are those that the policy declares, whatever the number of servers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.sync.outer import play, recipe_of
from unisono.config import DataConfig, Recipe, TrainConfig
from unisono.sync import POLICIES
from unisono_contrib.models.dlrm import DLRMConfig
from unisono_contrib.sync._servers.worker import ServerSync

pytestmark = pytest.mark.timeout(120)

STEPS, REPLICAS = 4, 3
HEAD = (
    256  # bytes of a message beside its tensors, at most; of each tensor its shape and type take this or less
)
TENSOR = 80


@pytest.fixture
def text(tmp_path: Path) -> Recipe:
    return recipe_of(tmp_path / "text.txt", STEPS, batch=6)


@pytest.fixture
def clicks() -> Recipe:
    """A recommender of large tables, whose gradients have the rows that a batch has read."""
    options: dict[str, Any] = {
        "optimizer": "sgd",
        "momentum": 0.0,
        "lr": 0.05,
        "clip": 0.0,
        "weight_decay": 0.0,
    }
    return Recipe(
        model=DLRMConfig(tables=(4000, 2000), lookups=2, d_table=16, n_dense=3, bottom=(8,), top=(8,)),
        data=DataConfig(source="clicks:samples=400"),
        train=TrainConfig(steps=STEPS, micro_batch=1, global_batch=6, dtype="float64", **options),
    )


def payload(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of tensors, of sparse ones of their rows and the rows' numbers."""
    each = ((x.indices(), x.values()) if x.is_sparse else (x,) for x in tensors if x is not None)
    return sum(part.nbytes for parts in each for part in parts)


class Seen:
    """What ranks push and hear, in payload bytes and tensors, beside the ledger."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pushed: list[int] = []
        self.heard, self.tensors, self.learned = 0, 0, 0
        deliver, hear = ServerSync.deliver, ServerSync._hear

        def delivering(sync: ServerSync, step: int, norm: float, stop: bool) -> None:
            slots = list(sync.site.learning())
            self.tensors, self.learned = len(slots), sum(slot.master.nbytes for slot in slots)
            self.pushed.append(payload(slot.master.grad for slot in slots))
            deliver(sync, step, norm, stop)

        def hearing(sync: ServerSync, op: str) -> Any:
            messages = hear(sync, op)
            self.heard += sum(payload(tensors) for _, tensors in messages)
            return messages

        patch.setattr(ServerSync, "deliver", delivering)
        patch.setattr(ServerSync, "_hear", hearing)

    def heads(self, messages: int, servers: int) -> int:
        """Bytes beside tensors that so many messages to or from all servers have at most."""
        return messages * (servers * HEAD + self.tensors * TENSOR)


def served(recipe: Recipe, servers: int, sync: str) -> dict[str, int]:
    """Bytes that all ranks have counted over dp, by operation."""
    recipe = recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"servers": servers})})
    ledgers = [end.ledger for end in play(recipe, f"dp={REPLICAS} sync={sync}")]
    return {op: sum(ledger.get(op, 0) for ledger in ledgers) for op in ("push", "serve")}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("sync", ["ssp:s=1", "ssp:s=0,copies=2", "async"])
def test_what_is_counted_is_what_the_policy_declares(text, monkeypatch, servers: int, sync: str) -> None:
    seen = Seen(monkeypatch)
    counted = served(text, servers, sync)
    declared = POLICIES.read(sync).served_work(seen.learned, REPLICAS, servers)
    push, serve = (call.nbytes for call in declared.calls)
    copies = push // seen.learned
    pushed, pulled = STEPS * REPLICAS * push, (STEPS + 1) * servers * serve  # the last time for `center`
    assert 0 <= counted["push"] - pushed <= seen.heads(STEPS * REPLICAS * copies, servers)
    assert 0 <= counted["serve"] - pulled <= seen.heads((2 * STEPS + 2) * REPLICAS, servers)
    assert seen.heard == pulled


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("copies", [1, 2])
def test_of_sparse_gradients_the_rows_are_counted_and_declared(
    clicks, monkeypatch, servers: int, copies: int
) -> None:
    seen, sync = Seen(monkeypatch), f"ssp:s=1,copies={copies}"
    counted = served(clicks, servers, sync)
    assert max(seen.pushed) < seen.learned / 20
    policy = POLICIES.read(sync)
    pushed = sum(policy.served_work(nbytes, REPLICAS, servers).calls[0].nbytes for nbytes in seen.pushed)
    assert 0 <= counted["push"] - pushed <= seen.heads(STEPS * REPLICAS * copies, servers)
    assert 0 <= counted["serve"] - seen.heard <= seen.heads((2 * STEPS + 2) * REPLICAS, servers)
    whole = policy.served_work(seen.learned, REPLICAS, servers).calls[1].nbytes
    assert (
        counted["serve"] < 2.5 * servers * whole
    )  # all weights at the beginning and at the end; rows in between


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_servers_share_what_their_links_move(servers: int, copies: int) -> None:
    """In sum they receive every gradient once for each copy, and send all weights to each replica; none to its own."""
    size, replicas = 1 << 20, 4
    one, many = (
        POLICIES.read(f"ssp:s=1,copies={copies}").served_work(size, replicas, n) for n in (1, servers)
    )
    assert many.calls[0].nbytes == one.calls[0].nbytes == copies * size
    assert many.calls[1].nbytes * servers == one.calls[1].nbytes == replicas * size
    held = min(copies, servers)  # of neighbouring parts, on one rank
    assert many.calls[0].link * servers == held * (replicas - 1) * size
    assert many.calls[1].link * servers == (replicas - 1) * size
    assert many.kept * servers == held * one.kept
