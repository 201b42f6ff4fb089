"""The memory of a simulated device: a set size, in blocks, of which segments stay once they were taken. No torch."""

from dataclasses import dataclass

_BLOCK, _SEGMENT = 512, 2 << 20  # as CUDA's caching allocator rounds


@dataclass(slots=True)
class DeviceMemory:
    """limit: bytes of the device. taken: bytes in tensors, in whole blocks. most: the most so far. reserved: bytes in
    segments, which stay until `drop_free`."""

    limit: int
    taken: int = 0
    most: int = 0
    reserved: int = 0

    def take(self, nbytes: int) -> None:
        """Room for a tensor. Raises MemoryError where there is none."""
        taken = self.taken + _rounded(nbytes, _BLOCK)
        if taken > self.limit:
            raise MemoryError(
                f"{nbytes:,} bytes asked for, {self.limit - self.taken:,} of {self.limit:,} free"
            )
        self.taken = taken
        self.most = max(self.most, taken)
        self.reserved = max(self.reserved, _rounded(taken, _SEGMENT))

    def give_back(self, nbytes: int) -> None:
        """A tensor is gone; its segment stays."""
        self.taken -= _rounded(nbytes, _BLOCK)

    def drop_free(self) -> None:
        """Give up the segments that no tensor needs."""
        self.reserved = _rounded(self.taken, _SEGMENT)


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
