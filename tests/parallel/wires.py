"""Ranks as threads, and messages between them in memory: a pipeline in one process, in milliseconds.

A message is a copy, and the n-th receive that is asked for gets the n-th message of its sender, as Gloo does it.
"""

import threading
from collections import defaultdict
from dataclasses import dataclass

PATIENCE = 20.0  # seconds until a message that does not come is a deadlock


class Post:
    """Everything that was sent, by (direction, sender, receiver)."""

    def __init__(self):
        self.messages = defaultdict(list)
        self.asked = defaultdict(int)
        self.arrived = threading.Condition()

    def group(self, direction, rank):
        return End(self, direction, rank)


@dataclass(frozen=True)
class End:
    """What one rank has of a direction: the part of a `Group` that a player uses."""

    post: Post
    direction: str
    rank: int

    def start_send(self, x, to):
        with self.post.arrived:
            self.post.messages[self.direction, self.rank, to].append(x.detach().clone())
            self.post.arrived.notify_all()
        return Arriving(self.post, (self.direction, self.rank, to), -1, None)

    def start_recv(self, out, source):
        channel = self.direction, source, self.rank
        with self.post.arrived:
            place = self.post.asked[channel]
            self.post.asked[channel] += 1
        return Arriving(self.post, channel, place, out)


@dataclass(frozen=True)
class Arriving:
    post: Post
    channel: tuple
    place: int
    out: object

    def wait(self):
        if self.out is None:
            return
        with self.post.arrived:
            came = self.post.arrived.wait_for(
                lambda: len(self.post.messages[self.channel]) > self.place, PATIENCE
            )
            assert came, f"nothing came on {self.channel}"
            message = self.post.messages[self.channel][self.place]
        assert message.shape == self.out.shape and message.dtype == self.out.dtype
        self.out.copy_(message)


def together(functions):
    """Each function in a thread of its own; their results, or the first error."""
    results, errors = [None] * len(functions), []

    def run(i):
        try:
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results
