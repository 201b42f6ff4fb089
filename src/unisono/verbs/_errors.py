"""How proofs show errors."""


def short(error: float | None) -> str:
    """`1.2e-15`; `=` for none at all, `none` for one without bound, `-` where nothing was compared."""
    if error is None:
        return "-"
    if not error:
        return "="
    return "none" if error >= 1e300 else f"{error:.1e}"
