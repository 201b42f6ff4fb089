"""A meeting of ranks as one of them sees it: an object that is made when they meet and left when one is lost.

Imports torch: rank side only.
"""

import socket
import threading
from collections.abc import Callable, Sequence

from unisono.comm import parting
from unisono.launch.rank.body import set_environment
from unisono.launch.rank.store import SocketStore
from unisono.launch.rank.watchdog import Watchdog
from unisono.spec.rendezvous import RankMeeting

Watch = Callable[[RankMeeting, SocketStore], Watchdog]


class Meeting:
    """One meeting, from its begin until this rank has left it for the next.

    place: this rank's. store: its keys, which no other meeting reads. watchdog: notices its hangs. earlier: connections
    of the meeting before, which are held until all ranks have left that.

    Any thread may call `leave`, as often as it likes; the main thread alone calls `next`. Connections of torch's groups
    that exist until `next` returns are this meeting's; `leave` cuts no others, and none of the user's own.
    """

    def __init__(
        self, place: RankMeeting, store: SocketStore, watch: Watch, earlier: Sequence[socket.socket] = ()
    ) -> None:
        self.place, self.store = place, store
        self._watch, self._earlier = watch, earlier
        self._lock = threading.Lock()
        self._held: list[socket.socket] = []
        self._turns, self._over = 0, False
        self.watchdog = watch(place, store)

    def leave(self) -> None:
        """Free whatever waits for other ranks here. The thread that hears of a loss calls this again until the main
        thread has come to the next meeting: that may have made connections meanwhile. Then it does nothing."""
        with self._lock:
            if self._over:
                return
            self._cut()
            if self._turns > 1 and self._turns.bit_count() == 1:  # ever more seldom
                parting.hang_up(self.place.present)

    def is_asking(self) -> bool:
        """Whether the main thread waits for an answer of the supervisor."""
        return self.store.is_asking()

    def next(self, place: RankMeeting) -> "Meeting":
        """The meeting that follows. torch's groups are forgotten; those made from now on are the next meeting's."""
        with self._lock:
            self._cut()
            self._over = True
        parting.forget()
        set_environment(place)
        return Meeting(place, self.store.anew(keys(place.epoch)), self._watch, self._held)

    def _cut(self) -> None:
        self._turns += 1
        if self._turns == 1:
            self.watchdog.dismiss()
            self.store.end()
            for sock in self._earlier:  # called from this meeting, all ranks have come to it
                sock.close()
        self._held += parting.cut()


def keys(epoch: int) -> str:
    """What keys in the store begin with in one epoch."""
    return f"epoch/{epoch}/" if epoch else ""
