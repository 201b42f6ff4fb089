"""What crosses `dp` under an optimiser: gradients, or the first moment that it makes of them."""

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from unisono.codecs import Coder
from unisono.codecs._moments import MomentCoder
from unisono.parallel.params import Slot
from unisono.spec.training import Optimiser

Around = Callable[[Coder], Coder]


def crossing_of(member: Optimiser, optimizer: Optimizer, slots: Sequence[Slot]) -> Around:
    """What is put around a codec that loses something. optimizer: the live one of `member`, on this rank."""
    decay = member.crossing
    if decay is None:
        return lambda coder: coder
    # Rows of tables are counted by themselves, and meet without a codec.
    masters = [slot.master for slot in slots if slot.live.requires_grad and not slot.lazy]

    def steps_made() -> int:
        """The optimiser's own counter, which a checkpoint brings along under any codec and any number of replicas."""
        counters = (optimizer.state.get(master, {}).get("step") for master in masters)
        return next(int(counter) for counter in counters if counter is not None)

    return lambda coder: MomentCoder(coder, decay, member.whole_steps, steps_made)
