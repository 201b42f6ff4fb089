"""How often to save, where failures come at any moment: Young (1974) and Daly (2006). Times in seconds.

A job stops at a failure, loads its last checkpoint and does again what came after it. Failures are independent, and as
likely at any moment: the times between them are exponential.
"""

from math import exp, expm1, sqrt


def young(save: float, mtbf: float) -> float:
    """Seconds of work between checkpoints (Young, 1974): the first order, for `save` far below `mtbf`."""
    return sqrt(2.0 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """The same in higher order (Daly, 2006); `mtbf` where saving takes longer than twice that."""
    if save >= 2.0 * mtbf:
        return mtbf
    small = save / (2.0 * mtbf)
    return sqrt(2.0 * save * mtbf) * (1.0 + sqrt(small) / 3.0 + small / 9.0) - save


def goodput(work: float, save: float, mtbf: float, restart: float) -> float:
    """Share of the time that is progress, with `work` seconds between checkpoints of `save` seconds.

    Exact for exponential failures, which may come during checkpoints and restarts too (Daly, 2006).
    """
    stretched = (work + save + restart) / mtbf
    if stretched > 700.0:  # a checkpoint is never reached
        return 0.0
    return work / (mtbf * exp(restart / mtbf) * expm1((work + save) / mtbf))


def between_failures(uptime: float, failures: int, prior: float) -> float:
    """Mean seconds between failures: what was observed, `prior` as long as there was none."""
    return uptime / failures if failures and uptime > 0 else prior


def steps_between(save: float, mtbf: float, step: float) -> int:
    """Daly's interval in whole steps of `step` seconds, at least one."""
    return max(1, round(daly(save, mtbf) / step)) if step > 0 else 1
