"""What it costs a rank to write down when it was ready for each collective, and what its modules take.

python benchmarks/sight.py            # some seconds, one process

A call: its entry in the log, beside the call. A line: its rows as JSON, in each step. A look: a step of a small GPT in
which modules are timed, beside one without, in turn; what that takes does not depend on the modules' size. A run looks
once a second in its first minute, and then every five. Medians, of processor time.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from unisono.config import ModelConfig
from unisono.models.build import build
from unisono.observe import metrics
from unisono.observe.calls import MOST, CallLog, rows
from unisono.observe.span import Recorder
from unisono.parallel.cut import Stage
from unisono.spec.model import Facts
from unisono.train.watch.module_times import LATER_S, SOON_S, ModuleTimes


def seconds(do: Callable[[], object], times: int, rounds: int = 15) -> float:
    """Of one call: the median over the rounds."""
    taken = []
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(times):
            do()
        taken.append((time.process_time() - begun) / times)
    return statistics.median(taken)


def looks(pairs: int) -> tuple[float, float, int, int]:
    """(seconds of a step, seconds more of one that is looked at, modules, hooks)."""
    torch.set_num_threads(1)
    model = build(ModelConfig(n_layer=5, n_head=2, d_model=32, context=16), Facts(vocab=256), device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    stage, recorder = Stage(model, range(5), 0, 1), Recorder()
    timed = ModuleTimes({0: stage}, recorder, torch.device("cpu"))
    tokens = torch.randint(0, 256, (2, 17))
    plain, more, hooks = [], [], 0
    for number in range(2 * pairs + 4):
        begun = time.process_time()
        if number % 2:
            timed._due = True
            timed.begin()
        loss = stage.loss(stage(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        if timed._look is not None:
            look = timed._look
            timed._end(look)
            hooks = look.hooks
        taken = time.process_time() - begun
        stage.zero_grad()
        if number >= 4:
            (more if number % 2 else plain).append(taken)
    extra = statistics.median(b - a for a, b in zip(plain, more, strict=True))
    return statistics.median(plain), extra, len(timed.modules), hooks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=200)
    flags = parser.parse_args()
    recorder = Recorder()
    with recorder.span("backward"):
        call = seconds(lambda: recorder.call("dp", "all_reduce", 1 << 20).ends(), 1000)
        recorder.calls.take()
    print(f"a call                {call * 1e6:8.2f} us")
    log = CallLog()
    for _ in range(4 * MOST):
        log.begin("dp", "all_reduce", 1 << 20, "backward").ends()
    calls = log.take()
    for count in (3, MOST // 4, MOST):
        line = seconds(lambda count=count: metrics._dumps({"calls": rows(calls[:count], 0)[0]}), 50)
        print(f"a line of {count:2} rows      {line * 1e6:8.2f} us")
    left = seconds(lambda: metrics._dumps({"calls": rows(calls, 0, MOST // 4)[0]}), 50)
    print(f"16 rows of {len(calls)} calls  {left * 1e6:8.2f} us")
    step, extra, modules, hooks = looks(flags.pairs)
    print(
        f"a look at {modules} modules  {extra * 1e6:8.0f} us ({hooks} hooks), of a step of {step * 1e3:.0f} ms"
    )
    print(
        f"looks, of all time    {max(0.0, extra) / SOON_S:8.3%} at first, {max(0.0, extra) / LATER_S:.3%} later"
    )


if __name__ == "__main__":
    main()
