"""The last lines of a run, as a person reads them."""

from typing import Any

from unisono.verbs.train.run import closing

SUMMARY: dict[str, Any] = {
    "loss": 1.5, "val_loss": 1.625, "tokens_per_s": 12345.6, "checkpoint": "runs/a/b/checkpoints/step-000003",
}  # fmt: skip


def test_the_loss_has_its_unit_and_the_speed_too() -> None:
    (line,) = closing(SUMMARY)
    assert "validation 1.6250 nats per token" in line and "12,346 tokens/s" in line
    (line,) = closing(SUMMARY, "samples")
    assert "validation 1.6250 nats per sample" in line and "12,346 samples/s" in line
    assert "loss" not in closing({**SUMMARY, "loss": None, "val_loss": None})[0]


def test_bytes_that_are_no_text_are_told_and_not_shown() -> None:
    shown = closing({**SUMMARY, "sample": "def f(x):\n    return caf\ufffd\x07"})
    assert shown[1:] == ["sample  def f(x):", "            return caf\ufffd·"]
    told = closing({**SUMMARY, "sample": "de\ufffd\ufffd\x00:"})
    assert told[1:] == ["sample  no text yet: 33 % of its characters are bytes that no text has"]


def test_bad_steps_are_told_the_many_by_a_few() -> None:
    steps = [{"step": step, "reason": "the loss is nan"} for step in range(1, 11)]
    back = [{"step": 6, "reason": "the loss is nan", "to": 4, "left_out": [5, 6, 7]}]
    told = closing({**SUMMARY, "skipped": steps, "rolled_back": back})
    assert told[1:] == [
        "bad     went back to step 4: step 6, the loss is nan",
        "bad     skipped the updates of steps 1, 2, 3, 4, 5, 6, 7, 8 and 2 more",
    ]
