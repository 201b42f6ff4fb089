"""What is thought of a validation: whether it is the best so far, and whether it is the last."""

from typing import NamedTuple


class Judgement(NamedTuple):
    """best: whether the weights now are the best so far. enough: why the run ends here, "" where it goes on. The same
    on every rank."""

    best: bool = False
    enough: str = ""
