"""sync=hogwild: one set of weights in memory that replicas share."""

import pytest
import torch

from tests.sync.outer import flat, recipe_of, trained
from unisono.plan import Plan
