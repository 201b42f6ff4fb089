"""Zero bubble in twice 1F1B's memory (ZB-2p; Qi et al., 2024, arXiv 2401.10241)."""

from unisono_contrib.programs.schedules.zb1p import Zb1p


class Zb2p(Zb1p):
    """No bubble at all if F, B and W cost the same and micros >= 2 ranks - 1; any number is served.

    That is: between its own first start and last stop no rank waits. Ranks start and end one after the other, so their
    updates must not wait for each other either. With other costs at most (ranks-1)(F+B-2W) where that is positive. Each
    rank holds at most 2 ranks micro-batches, from F until W. The order is the paper's ZB-H2.
    """

    name = "zb2p"
    memory = 2
