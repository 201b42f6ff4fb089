"""The fuzz of stacks: cases played one after the other on processes of one fork server; what fails is shrunk."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count

from unisono.launch.fork_server import ForkServer
from unisono.library.gradient_check import GradientVerdict
from unisono.spec.errors import HangError, UnisonoError
from unisono_contrib.library.stack_fuzz.case import StackCase, Words, case_of, draw, no_case, parse, smaller
from unisono_contrib.library.stack_fuzz.step import DrawnStep
from unisono_contrib.library.stacks._adapter import StackAdapter, stack_named
from unisono_contrib.library.stacks._check import stack_on
from unisono_contrib.library.stacks._rank import ENTRY
from unisono_contrib.verify.fuzz import FuzzFailure, FuzzResult
from unisono_contrib.verify.fuzz.found import kind_of, shrunk

StackFailure = FuzzFailure[StackCase]
StackResult = FuzzResult[StackCase]
TIMEOUT = 60.0  # seconds that a rank may keep the others waiting
SHRUNK = 3  # failures


@dataclass(frozen=True, slots=True)
class StackFuzz:
    """Proves cases on processes of a fork server of ENTRY."""

    server: ForkServer

    def verdict(self, case: StackCase) -> GradientVerdict:
        """What `check_stack` says of a case. Raises UnisonoError."""
        words = dict(case.words)
        ranks, micros, steps = (words.pop(key) for key in ("ranks", "micros", "steps"))
        groups = stack_named(case.stack).groups(ranks, case.options)
        step = partial(DrawnStep, **words, each=groups * micros)
        return stack_on(self.server, case.stack, step, ranks, micros, steps, case.options, timeout=TIMEOUT)

    def prove(self, case: StackCase, result: StackResult) -> None:
        """Add to the result what comes of a case: proven, refused by the stack or by `check_stack`, or wrong."""
        try:
            verdict = self.verdict(case)
        except HangError as error:
            result.failures.append(
                FuzzFailure(case, case, f"hang: {error.what}", {"pass": False, "cause": "hang"})
            )
        except UnisonoError as error:
            result.refused[f"{case.stack}: {kind_of(error.code, error.what)}"] += 1
        else:
            if verdict.passed:
                result.prove(case)
            else:
                result.failures.append(failure_of(case, verdict))

    def shrink(self, failure: StackFailure) -> StackFailure:
        """The failure with the least case that fails too."""

        def fails(case: StackCase) -> StackFailure | None:
            alone = StackResult()
            self.prove(case, alone)
            return next(iter(alone.failures), None)

        return shrunk(failure, smaller, fails)


def failure_of(case: StackCase, verdict: GradientVerdict) -> StackFailure:
    """The failure of a case of which this is the verdict."""
    row = {"pass" if key == "passed" else key: value for key, value in asdict(verdict).items()}
    return FuzzFailure(case, case, str(verdict).replace("\n", " "), row)


@contextmanager
def opened() -> Iterator[StackFuzz]:
    """A fork server for all cases."""
    with ForkServer(ENTRY, path=[os.getcwd(), *(entry for entry in sys.path if entry)]) as server:
        yield StackFuzz(server)


def playable(name: str) -> type[StackAdapter]:
    """The stack of this name. Raises UsageError V08 where it is unknown or not installed, V12 where no case of it is
    drawn."""
    kind = stack_named(name)
    if kind.draws is None:
        raise no_case(f"no training step is drawn for {name}", "unisono verify --stack ddp,fsdp2 --fuzz 50")
    return kind


def fuzz_stacks(
    text: str,
    most: int,
    seed: int,
    heard: Callable[[StackResult], None] = lambda result: None,
    keep_going: bool = False,
) -> StackResult:
    """Prove at least `most` drawn cases; ends early after the first failure, which is shrunk. text: stacks, and words
    that are not drawn: `ddp,fsdp2 model=gpt`. heard: hears what is known so far after each case. keep_going: goes on
    after a failure. Raises UsageError V08, V12, also where nearly all that is drawn is refused."""
    names, words = parse(text)
    kinds = {name: playable(name) for name in names}
    result = StackResult()
    with opened() as fuzz:
        for case in drawn(kinds, seed, words):
            fuzz.prove(case, result)
            heard(result)
            if result.proven + len(result.failures) >= most or (result.failures and not keep_going):
                break
            if (refused := sum(result.refused.values())) > 4 * most + 20:
                kind, often = result.refused.most_common(1)[0]
                raise no_case(f"{refused} drawn cases were refused, {often} times {kind}", case.command())
        result.failures = [fuzz.shrink(failure) for failure in result.failures[:SHRUNK]]
    return result


def drawn(kinds: dict[str, type[StackAdapter]], seed: int, words: Words) -> Iterator[StackCase]:
    """Cases without end, of one stack after the other."""
    names = list(kinds)
    for number in count():
        name = names[number % len(names)]
        yield draw(name, kinds[name], seed, number, words)


def prove_stack(text: str) -> tuple[StackCase, GradientVerdict]:
    """The case of these words, `ddp ranks=3 model=gpt`, and what comes of it. Raises UnisonoError, as check_stack does,
    and UsageError V12 for words that make no case."""
    names, words = parse(text)
    if len(names) != 1:
        raise no_case("several stacks are a fuzz", "unisono verify --fuzz 50 --stack ddp,fsdp2")
    playable(names[0])
    case = case_of(names[0], words)
    with opened() as fuzz:
        return case, fuzz.verdict(case)
