"""Which parameters a policy acts on. slots: `parallel.params.Slot`, all parameters of a rank."""

from collections.abc import Iterator, Sequence
from typing import Any

from unisono.spec.errors import UsageError


def learning(slots: Sequence[Any]) -> Iterator[Any]:
    """Those that are trained, each storage once."""
    owned = {slot.master.data_ptr() for slot in slots if not slot.alias}
    for slot in slots:
        if slot.live.requires_grad and not (slot.alias and slot.master.data_ptr() in owned):
            yield slot


def learning_dense(slots: Sequence[Any], sync: str) -> list[Any]:
    """The same, for a policy that keeps their gradients. sync: its name. Raises UsageError P24 where one has a gradient
    of a few rows."""
    chosen = list(learning(slots))
    if any(slot.sparse for slot in chosen):
        what = f"sync={sync} keeps gradients of several steps, and those of tables have other rows in each"
        raise UsageError(what, where="plan.sync, model.kind", fix="sync=every_step", code="P24")
    return chosen
