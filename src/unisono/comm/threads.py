"""The address of a world on threads, `run(4, function)`, which lies in `unisono_contrib.comm.threads`."""

from typing import TYPE_CHECKING

from unisono.spec.finder import door

if TYPE_CHECKING:
    from unisono_contrib.comm.threads import WorldEnded as WorldEnded
    from unisono_contrib.comm.threads import run as run

__getattr__ = door(__name__)
