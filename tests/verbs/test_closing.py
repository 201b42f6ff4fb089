"""The last lines of a run, as a person reads them."""

from typing import Any

from unisono.verbs.train.run import closing

SUMMARY: dict[str, Any] = {
    "loss": 1.5, "val_loss": 1.625, "tokens_per_s": 12345.6, "checkpoint": "runs/a/b/checkpoints/step-000003",
}  # fmt: skip


def test_the_loss_has_its_unit_and_the_speed_too() -> None:
    (line,) = closing(SUMMARY)
    assert "validation 1.6250 nats a target" in line and "12,346 targets/s" in line
    assert "loss" not in closing({**SUMMARY, "loss": None, "val_loss": None})[0]


def test_bytes_that_are_no_text_are_told_and_not_shown() -> None:
    shown = closing({**SUMMARY, "sample": "def f(x):\n    return caf\ufffd\x07"})
    assert shown[1:] == ["sample  def f(x):", "            return caf\ufffd·"]
    told = closing({**SUMMARY, "sample": "de\ufffd\ufffd\x00:"})
    assert told[1:] == ["sample  no text yet: 33 % of its characters are bytes that no text has"]
