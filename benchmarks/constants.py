"""Every constant of the planner's model: value, origin, source. `make accuracy` ends with how many there are of each.

python benchmarks/constants.py            all of them
python benchmarks/constants.py fitted     those of one origin
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.fitting.constants import constants
from unisono.planner.source import ORIGINS


def main(words: list[str]) -> None:
    wanted = words or list(ORIGINS)
    for constant in constants():
        if constant.source is not None and constant.source.origin in wanted:
            value = f"{constant.value:.6g}" if isinstance(constant.value, float) else str(constant.value)
            print(f"{constant.where:<28} {constant.name:<18} {value:<14} {constant.source}")
    print(counted())


def counted() -> str:
    """How many of each origin. Without one: limits of searches and fits, and units, which no price depends on."""
    many = Counter(c.source.origin for c in constants() if c.source is not None)
    parts = ", ".join(f"{many[origin]} {origin}" for origin in ORIGINS if many[origin])
    return f"constants of the model: {sum(many.values())}: {parts}"


if __name__ == "__main__":
    main(sys.argv[1:])
