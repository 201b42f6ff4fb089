"""Places of peers in the order of samples: a number for each name, given once and kept.

    places/00000000.json   the peers that begin together, in the order of names: the first places are theirs
    places/00000001.json   a peer that came later: the next place

Each object is created where nothing is yet. So two peers never get one place, and a peer that is started again under
its name finds its own.
"""

from collections.abc import Callable, Iterator

from unisono_contrib.comm.depot import Depot
from unisono_contrib.comm.mailbox.letters import SEAL, create, unsealed

FOLDER = "places"


def take_place(depot: Depot, peer: str, living: Callable[[], list[str]], founders: int) -> int | None:
    """The place of a peer, from 0; None as long as fewer than `founders` peers are there to begin together.

    living(): names of the peers that live, this one among them, sorted. Call it again while it returns None.
    """
    taken = list(_taken(depot))
    if peer in taken:
        return taken.index(peer)
    if not taken:
        if len(here := living()) < founders:
            return None
        create(depot, _path(0), {"peers": here})
    else:
        create(depot, _path(_objects(depot)), {"peers": [peer]})
    return take_place(depot, peer, living, founders)  # another may have been quicker


def _taken(depot: Depot) -> Iterator[str]:
    """Names by their places."""
    for number in range(_objects(depot)):
        yield from (unsealed(depot, _path(number)) or {"peers": []})["peers"]


def _objects(depot: Depot) -> int:
    """How many objects there are, of which none is missing."""
    number = 0
    while unsealed(depot, _path(number)) is not None:
        number += 1
    return number


def _path(number: int) -> str:
    return f"{FOLDER}/{number:08d}{SEAL}"
