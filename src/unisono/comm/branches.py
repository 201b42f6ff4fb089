"""Whole branches of the tree over the micro-batches of a step, one for each replica, by their speeds. No torch.

Who holds a whole branch adds its leaves up as the tree does, and sends one sum.
"""

from collections.abc import Iterator, Sequence

from unisono.comm.tree import split

Branch = tuple[int, int]
"""A node of the tree (see `comm.tree`): the micro-batches [low, high)."""


def branches_by_speed(units: int, speeds: Sequence[float]) -> list[Branch]:
    """A branch of 2^k micro-batches for each replica, the quicker the larger, so that the last is done soon; [] where
    the tree over `units` has not as many. speeds: of the replicas.

    branches_by_speed(8, [1.0, 4.0, 1.0])  # [(4, 6), (0, 4), (6, 8)]

    From any cut of the tree others follow by exchanges: two small neighbours grow together, and a large branch falls in
    two. An exchange that ends sooner is made, until none does.
    """
    cut = _first_cut(units, len(speeds))
    while True:
        ends, exchanged = min(((_ends(other, speeds), other) for other in _exchanges(cut)), default=([], cut))
        if not ends or ends >= _ends(cut, speeds):
            break
        cut = exchanged
    if len({high - low for low, high in cut}) < 2:
        return cut  # nobody is preferred: replicas keep their order
    largest = sorted(cut, key=lambda branch: (branch[0] - branch[1], branch))
    quickest = sorted(range(len(speeds)), key=lambda i: (-speeds[i], i))
    taken = dict(zip(quickest, largest, strict=True))
    return [taken[i] for i in range(len(speeds))]


def _ends(cut: Sequence[Branch], speeds: Sequence[float]) -> list[float]:
    """When replicas are done, the last first, where the quickest has the largest branch."""
    sizes = sorted((high - low for low, high in cut), reverse=True)
    return sorted(
        (n / speed for n, speed in zip(sizes, sorted(speeds, reverse=True), strict=True)), reverse=True
    )


def _first_cut(units: int, replicas: int) -> list[Branch]:
    """The tree cut into as many branches of 2^k units, the largest ones first; [] where it has not as many."""
    cut = [(0, units)]
    while len(cut) < replicas or any(_is_odd(branch) for branch in cut):
        odd = [branch for branch in cut if _is_odd(branch)]
        largest = max(odd or cut, key=lambda branch: (branch[1] - branch[0], -branch[0]))
        if len(cut) == replicas or largest[1] - largest[0] == 1:
            return []
        cut.remove(largest)
        cut += _halves(largest)
    return sorted(cut)


def _is_odd(branch: Branch) -> bool:
    size = branch[1] - branch[0]
    return bool(size & (size - 1))


def _halves(branch: Branch) -> tuple[Branch, Branch]:
    low, high = branch
    middle = low + split(high - low)
    return (low, middle), (middle, high)


def _exchanges(cut: Sequence[Branch]) -> Iterator[list[Branch]]:
    """Cuts in which one pair of halves has become its branch, and another branch its halves; one of each two sizes."""
    held, seen = set(cut), set[tuple[int, int]]()
    pairs = [((low, high), (high, 2 * high - low)) for low, high in cut if not low % (2 * (high - low))]
    for pair in pairs:
        if pair[1] not in held:
            continue
        (low, middle), (_, high) = pair
        for branch in cut:
            sizes = middle - low, branch[1] - branch[0]
            if sizes in seen or branch in pair or sizes[1] == 1:
                continue
            seen.add(sizes)
            yield sorted([*(held - {*pair, branch}), (low, high), *_halves(branch)])
