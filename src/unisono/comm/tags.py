"""Tags of messages between the members of a process group. Each kind of message has a range of its own: one of another
kind, sent meanwhile in the same group, can never be taken for it.

A kind of message that is new gets a range behind the last one here, and no number of its own making.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TagRange:
    """`count` tags from `first` on."""

    first: int
    count: int

    def of(self, number: int) -> int:
        """The tag of the message of that number; after `count` of them tags begin anew."""
        return self.first + number % self.count

    def then(self, count: int) -> "TagRange":
        """The next range behind this one."""
        return TagRange(self.first + self.count, count)


PLAIN = TagRange(0, 1)
"""Of messages that need none: torch's own default."""
PROGRAMS = PLAIN.then(1 << 16)
"""Of a collective that is a program: one an operation."""
PIECES = PROGRAMS.then(1 << 21)
"""Of pieces that pass through shared memory: two words each."""
SLOTS = PIECES.then(1)
"""Of words that say in which slot a message lies."""
WHOLES = SLOTS.then(1 << 16)
"""Of messages for which no slot was free."""
LOANS = WHOLES.then(1)
"""Of words about memory that is lent."""
HOSTS = LOANS.then(1 << 20)
"""Of words that say that the parts of all hosts are there."""
UNANSWERED = HOSTS.then(1)
"""Of receives by which a connection is tried; nobody sends these."""
