"""A user's own starter, and others with one fault each."""

from dataclasses import replace

from unisono.launch.starters import Started, Starter, number, required
from unisono.spec.errors import UsageError


class Toy(Starter):
    """`TOY_RANK` of `TOY_RANKS`."""

    name = "toy"
    turn = 5

    def detect(self, environ):
        if "TOY_RANK" not in environ:
            return None
        names = ("TOY_RANK", "TOY_RANKS", "TOY_LOCAL", "TOY_HERE", "TOY_HOST")
        required(environ, names, "toy")
        return Started("toy", *(number(environ, name) for name in names[:-1]), environ["TOY_HOST"], 29500)

    def leaves(self, host, local_rank, hosts):
        numbers = (sum(hosts[:host]) + local_rank, sum(hosts), local_rank, hosts[host])
        names = ("TOY_RANK", "TOY_RANKS", "TOY_LOCAL", "TOY_HERE")
        return {"TOY_HOST": "host0", **dict(zip(names, map(str, numbers), strict=True))}


class Off(Toy):
    """Rank 1 is told that it is another one."""

    name = "off"

    def detect(self, environ):
        place = super().detect(environ)
        return replace(place, rank=place.world - 1) if place and place.rank == 1 else place


class Twice(Toy):
    """Every host counts its ranks from 0."""

    name = "twice"

    def detect(self, environ):
        place = super().detect(environ)
        return place and replace(place, rank=place.local_rank)


class Claiming(Toy):
    """Takes a task of Slurm for one of its own."""

    name = "claiming"

    def detect(self, environ):
        if "SLURM_PROCID" in environ:
            return Started("toy", 0, 1, 0, 1, "127.0.0.1", 29500)
        return super().detect(environ)


class Guessing(Toy):
    """Without a size, it is the only rank."""

    name = "guessing"

    def detect(self, environ):
        return super().detect({"TOY_RANKS": "1", **environ})


class Silent(Toy):
    """Without its rank or its size, nobody started it."""

    name = "silent"

    def detect(self, environ):
        return super().detect(environ) if "TOY_RANKS" in environ else None


class Apart(Toy):
    """Each host has its own place to meet."""

    name = "apart"

    def leaves(self, host, local_rank, hosts):
        return {**super().leaves(host, local_rank, hosts), "TOY_HOST": f"host{host}"}


class SameTurn(Toy):
    """Asked when Slurm is asked."""

    name = "same_turn"
    turn = 30


class Late(Toy):
    """Its ranks have the plain variables too, with which others may have started them."""

    name = "late"
    turn = 60

    def leaves(self, host, local_rank, hosts):
        return {**super().leaves(host, local_rank, hosts), "RANK": "0"}


class Wordless(Toy):
    """Refuses what lacks a variable, and does not say which."""

    name = "wordless"

    def detect(self, environ):
        if 0 < len([name for name in environ if name.startswith("TOY_")]) < 5:
            raise UsageError("that is not all")
        return super().detect(environ)
