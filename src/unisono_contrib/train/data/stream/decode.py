"""From an encoded picture to the numbers that a model reads, with a function of the user's if there is one. The same in
threads, in worker processes and on data hosts. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from unisono.spec.errors import UsageError
from unisono.spec.finder import function_in
from unisono.spec.frames import of_user
from unisono.train.data.tokenised.chats import BadRecord
from unisono_contrib.train.data.decoding import pixels_of, upright

KEY = "data.transform"
Draw = tuple[int, int]
"""(seed, position): a visit of a sample, which no other visit of any sample has."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """shape: [C, H, W]. transform: FILE.py:FUNCTION, or "": pictures are cut around their middle and resized."""

    shape: tuple[int, ...]
    transform: str = ""

    @property
    def dtype(self) -> type[np.generic]:
        """uint8 in 0..255, or float32 as the user's function leaves them."""
        return np.float32 if self.transform else np.uint8

    def check(self) -> None:
        """Raises UsageError C03 where there is no such function, and what its file raises."""
        if self.transform:
            _function(self.transform)

    def pixels(self, body: bytes, draw: Draw | None, place: str = "") -> np.ndarray:
        """A picture, [C, H, W] of `dtype`. draw: None in a validation. place: SHARD:BYTE, for messages. Raises
        BadRecord where it cannot be decoded, UsageError D10, UserCodeError where the user's function raises or returns
        something else."""
        try:
            if not self.transform:
                return pixels_of(BytesIO(body), self.shape)
            picture = upright(BytesIO(body), self.shape[0])
        except UsageError:
            raise
        except Exception as error:  # a decoder may refuse a broken file in any way that it likes
            raise BadRecord(f"a picture cannot be decoded: {type(error).__name__}: {error}") from error
        return self._transformed(picture, draw, place)

    def _transformed(self, picture: Any, draw: Draw | None, place: str) -> np.ndarray:
        function, random = _function(self.transform), None
        if draw is not None:
            key = np.array([number % (1 << 64) for number in draw], dtype=np.uint64)
            random = np.random.Generator(np.random.Philox(key=key))
        try:
            array = np.asarray(function(picture, random))
            if array.shape != tuple(self.shape):
                raise ValueError(f"an array of {list(array.shape)}, and the model reads {list(self.shape)}")
            whole = array.astype(np.float32)
        except Exception as error:
            wrapped = of_user(error, f"{KEY} {self.transform}", self.transform)
            wrapped.likely = f"with the picture at {place}" if place else ""
            raise wrapped from error
        return whole / np.float32(255) if array.dtype == np.uint8 else whole


@cache
def _function(text: str) -> Callable[..., Any]:
    return function_in(text, f"unisono_transform_{Path(text.rpartition(':')[0]).stem}", KEY)
