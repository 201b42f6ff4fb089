"""Lists of hosts as Slurm writes them. No torch."""

import re
from itertools import islice, product

_MOST = 1 << 20
"""More than any job has: a longer list is no list."""
_WORD = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def hosts_in(text: str, most: int = _MOST) -> list[str]:
    """The hosts of a list: `gpu[07-09,12],login` is gpu07, gpu08, gpu09, gpu12, login; () of what is no list. most: no
    more than so many of its first ones. Zeros in front of a number set its width, as in Slurm."""
    words = _WORD.findall(text)
    if ",".join(words) != text:
        return []
    hosts: list[str] = []
    for word in words:
        parts = [
            _numbers(part[1:-1]) if part[0] == "[" else [part]
            for part in re.split(r"(\[[^]]*\])", word)
            if part
        ]
        if not all(parts):
            return []
        hosts += map("".join, islice(product(*parts), most - len(hosts)))
    return hosts


def _numbers(text: str) -> list[str]:
    """`07-09,12` as 07, 08, 09, 12; [] of what is none."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first or last - first >= _MOST:
            return []
        numbers += (str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return numbers
