"""Where a constant comes from."""

from dataclasses import dataclass
from typing import Literal

Origin = Literal["specification", "fitted", "measured here", "assumed", "given"]
ORIGINS: tuple[Origin, ...] = ("specification", "fitted", "measured here", "assumed", "given")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a constant comes from.

    specification: a data sheet, the vendor's page, the program itself. fitted: to published measurements, which `text`
    names, with the device that they are carried over from, if another. measured here: on the machine that `text`
    names, or the user's own. Users' files alone may also say assumed, of which `text` says on what ground, and given,
    which is what a number without a source counts as.
    """

    origin: Origin
    text: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.text}" if self.text else self.origin
