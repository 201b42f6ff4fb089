"""What a price says a step is made of."""

from unisono.planner.price_parts import Price


def together(got: Price) -> float:
    """Seconds of all parts."""
    passes = got.arithmetic + got.kernels + got.recompute + got.host + got.idle + got.uneven
    return passes + got.optimizer + got.fixed + got.exposed + got.straggling + got.loading
