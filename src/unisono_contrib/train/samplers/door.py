"""Where samplers are: each writes its port into the run's store, under keys that stay when ranks meet anew."""

from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

from unisono.spec.beside import BesideRanks
from unisono_contrib.sync._servers import wire

SILENCE = 15.0
"""Seconds for which a sampler may say nothing."""


def announce(store: Any, number: int, port: int) -> None:
    """A sampler has come."""
    birth = store.add(_births(number), 1)
    store.set(_port(number, birth), str(port))


def births(beside: BesideRanks, number: int) -> int:
    """How often this sampler has come so far, a new process each time."""
    return beside.store.add(_births(number), 0)


def call(beside: BesideRanks, number: int, birth: int, patience: float, silence: float) -> Connection:
    """A connection to the process that came as the `birth`-th of this sampler, waiting `patience` seconds for it.
    silence: see `SamplerPool`. Raises RuntimeError where it does not come, OSError and EOFError where it has gone."""
    beside.store.wait([_port(number, birth)], timedelta(seconds=patience))
    port = int(beside.store.get(_port(number, birth)))
    try:
        return wire.call("127.0.0.1", port, beside.token.encode(), {}, silence)
    except (AuthenticationError, ValueError) as error:  # another program has the port by now
        raise ConnectionError(str(error)) from error


def _births(number: int) -> str:
    return f"sampler/{number}/births"


def _port(number: int, birth: int) -> str:
    return f"sampler/{number}/port/{birth}"
