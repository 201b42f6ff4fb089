"""Parameters in bf16 beside masters in fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.threads import prove
from tests.train.small import recipe, started
from unisono.plan import Plan


def stored(ctx: Any, folder: str, plan: str) -> Any:
    from unisono.train.state.run_state import pieces_of
    from unisono.train.step.train_step import train_step

    run, feed, _ = started(ctx, recipe(Path(folder), dtype="float32"), plan)
    train_step(run, feed.fetch(0, run.leaves))
    run.player.play(run.eval_row, feed.fetch(1, run.leaves), 1.0, None)  # reads them once more
    pieces = {piece.name: piece.tensor.detach().clone() for piece in pieces_of(run) if piece.saved}
    held = {slot.name: slot.live.detach() for slot in run.local.slots}
    crossing = {tensor.dtype for wire in run.local.wires.values() for tensor in wire.carry}
    return pieces, held, crossing


def test_modules_hold_bf16_and_checkpoints_the_masters(threads: Any, tmp_path: Path) -> None:
    ((pieces, held, _),) = threads(stored, 1, group=False, folder=str(tmp_path), plan="precision=bf16:params")
    assert {tensor.dtype for tensor in pieces.values()} == {torch.float32}
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    for name, live in held.items():
        master = pieces.get(f"model/{name}")
        assert master is None or torch.equal(live, master.to(torch.bfloat16))
    assert any(
        (pieces[f"model/{name}"] != live).any() for name, live in held.items() if f"model/{name}" in pieces
    )


def test_stages_hand_on_bf16(threads: Any, tmp_path: Path) -> None:
    for _, _, crossing in threads(stored, 2, folder=str(tmp_path), plan="pp=2 precision=bf16:params"):
        assert crossing == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plans_with_bf16_parameters_are_proven(tmp_path: Path) -> None:
    plans = ["pp=2", "dp=2 shard=2 zero=2", "shard=2 pp=2", "dp=2 sync=canonical"]
    given = recipe(tmp_path, global_batch=4, micro_batch=1, dtype="float32")
    for proof in prove(given, [Plan.parse(f"{text} precision=bf16:params") for text in plans], steps=2):
        assert proof.passed and proof.verdict == "proven", proof
        assert proof.bit_identical == (proof.fidelity == "EXACT"), proof
