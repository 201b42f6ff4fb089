"""Python's garbage collection between steps, rather than somewhere within one.

A collection within a step comes on each rank at another time, and all others wait for it in the next sum. Between steps
ranks collect together, after as many steps as they are asked to.
"""

import gc


class StepCollections:
    """Holds collections until `stepped`, from when it is made to `close`. every: steps from one to the next; 0 leaves
    them to Python."""

    def __init__(self, every: int) -> None:
        self._every, self._automatic = every, gc.isenabled()
        if every:
            if not gc.get_freeze_count():  # ranks that a helper forked have what it imported frozen already
                gc.freeze()
            gc.disable()

    def stepped(self, step: int) -> None:
        """Step `step` is over: collect if it is time to."""
        if self._every and step % self._every == 0:
            gc.collect()

    def close(self) -> None:
        """Python collects as it did before."""
        if self._every and self._automatic:
            gc.enable()
