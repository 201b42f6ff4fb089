"""What is left with servers after a rank was lost: every part of which one holder lives, all after the same update.

A shard that lives may be some entries of the log behind another one, where the sequencer died in the middle. It has all
that these entries need, so it carries them out, and nobody has to go back (state machine replication, Schneider 1990).
"""

from collections.abc import Callable, Sequence
from typing import Any

from unisono_contrib.sync._servers.host import ShardHost

Tell = Callable[[str, Any], list[Any]]
"""(a name, JSON) → what every rank says under this name, in the order of ranks."""


def salvage(hosts: Sequence[ShardHost], tell: Tell) -> tuple[int, list[ShardHost]]:
    """Bring the shards of all ranks to the newest version that any of them has. Every rank that is left calls it, or it
    hangs.

    hosts: the shards on this rank, which hear nothing any more. Returns (version, those of `hosts` that have it);
    version is -1 where training had not begun.
    """
    for host in hosts:
        host.end()
    done = [n for each in tell("done", [host.done for host in hosts]) for n in each]
    oldest, newest = min(done, default=0), max(done, default=0)
    mine = next((host.log(oldest) for host in hosts if host.done == newest > oldest), [])
    entries = next((log for log in tell("log", mine) if log), [])
    for host in hosts:
        host.catch_up(entries)
    version = max(
        (v for each in tell("version", [host.shard.version for host in hosts]) for v in each), default=-1
    )
    return version, [host for host in hosts if host.shard.version == version]
