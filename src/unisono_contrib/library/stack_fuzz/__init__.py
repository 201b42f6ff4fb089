"""`unisono verify --fuzz N --stack ddp,fsdp2`: training steps drawn from a seed, played on other stacks.

case: what is drawn, its words, and what is less · models, step: what they mean · run: the fuzz
"""

from unisono_contrib.library.stack_fuzz.case import DIMENSIONS, StackCase
from unisono_contrib.library.stack_fuzz.run import StackFuzz, failure_of, fuzz_stacks, prove_stack

__all__ = ["DIMENSIONS", "StackCase", "StackFuzz", "failure_of", "fuzz_stacks", "prove_stack"]
