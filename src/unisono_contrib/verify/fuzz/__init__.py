"""`unisono verify --fuzz N`: plans and recipes drawn from a seed, each proven against one device. No torch here."""

from unisono_contrib.verify.fuzz.draw import DIMENSIONS, FuzzCase
from unisono_contrib.verify.fuzz.found import FuzzFailure, FuzzResult
from unisono_contrib.verify.fuzz.run import fuzz

__all__ = ["DIMENSIONS", "FuzzCase", "FuzzFailure", "FuzzResult", "fuzz"]
