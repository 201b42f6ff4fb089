"""Where a verb listens, as its flag says it."""

from unisono.spec.errors import UsageError


def address_of(text: str, where: str) -> tuple[str, int]:
    """(address, port) of `ADDRESS:PORT`. where: the flag. Raises UsageError C04."""
    address, colon, port = text.rpartition(":")
    if not colon or not address or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is no ADDRESS:PORT", where=where, fix="10.0.0.1:7400", code="C04")
    return address.strip("[]"), int(port)
