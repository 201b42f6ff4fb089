"""What is thought of validations: which was the best so far, and whether the last of them ends the run."""

from typing import NamedTuple


class ValidationVerdict(NamedTuple):
    """best: the step of the best validation, 0 before one. enough: why the run ends here, "" where it goes on. The same
    on every rank."""

    best: int = 0
    enough: str = ""
