"""An operation of a group on its way: beside compute until somebody waits for it, exposed from then on."""

import time

from unisono.comm.group import Group, Pending


class Flight:
    """Recorded when it lands. op: what is on its way, as its group calls it."""

    def __init__(self, group: Group, op: str, pending: Pending) -> None:
        self._group, self._pending, self._tags = group, pending, {"axis": group.axis, "op": op}
        self._left_ns = time.perf_counter_ns()

    def land(self) -> None:
        """Wait until it is over; once."""
        recorder = self._group.recorder
        recorder.add("comm", self._left_ns, time.perf_counter_ns(), exposed=False, **self._tags)
        with recorder.span("comm", exposed=True, **self._tags):
            self._pending.wait()
