"""A run's model as a function, whatever its plan: for evaluations of a user's own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from unisono.parallel.player import Player
from unisono.spec.errors import UsageError, UserCodeError
from unisono.spec.finder import function_in
from unisono.spec.frames import of_user
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Micro
from unisono.train.step.run import Run


class PlayedModel:
    """The model under its plan, for a function of a user's own: `model(inputs) → logits`.

    Every rank of the run calls it at once, with the same inputs, or it hangs; each gets the outputs of all samples, on
    its own device. step: updates made. window: positions of a sample, 0 where there are none. encode, decode: text to
    tokens and back, None where there is no text. rank: to print on one. dtype: of logits.
    player: the run's own, if it has got another one around it.
    """

    def __init__(
        self, run: Run, corpus: Corpus, dtype: torch.dtype = torch.float32, player: Player | None = None
    ) -> None:
        self._run, self._dtype, self._player = run, dtype, player or run.player
        self._inputs, self._targets = corpus.train.fetch(np.zeros(1, dtype=np.int64))
        self.step, self.rank, self.device = run.step, run.mesh.rank, run.local.device
        self.encode, self.decode = corpus.encode, corpus.decode
        self.window = self._targets.shape[1] if self._targets.dim() > 1 else 0

    @torch.no_grad()
    def __call__(self, inputs: Tensor, at: Tensor | None = None) -> Tensor:
        """inputs [n, ...], as the data's; sequences may be shorter than a window → logits [n, ..., classes] in `dtype`.

        at: int64 [n], one position of each sample; then [n, classes] alone. No more samples are held at a time than a
        step has. Raises ValueError where a sequence is longer than a window.
        """
        length, run = inputs.shape[1] if self.window else 0, self._run
        if length > self.window:
            raise ValueError(f"sequences of {length} tokens, the model's window has {self.window}")
        inputs = inputs.to(run.local.device, self._kind(inputs))
        size = run.replica.global_batch
        parts = [
            self._together(part, None if at is None else at[i * size : (i + 1) * size].to(run.local.device))
            for i, part in enumerate(inputs.split(size))
        ]
        whole = torch.cat(parts)
        return whole[:, :length] if self.window and at is None else whole

    def _kind(self, inputs: Tensor) -> torch.dtype:
        return self._run.replica.dtype if inputs.is_floating_point() else self._inputs.dtype

    def _together(self, inputs: Tensor, at: Tensor | None) -> Tensor:
        """The logits of at most as many samples as a step has. Leaves are dealt as in training, and what each rank of
        the last stage has made is added to zeros."""
        run, window = self._run, self.window
        size = run.replica.global_batch
        micro = size // run.of_leaves
        rows = inputs.new_zeros((size, *self._inputs.shape[1:]))
        rows[(slice(len(inputs)), slice(inputs.shape[1])) if window else slice(len(inputs))] = inputs
        # Which sample and which position a target stands for: who has its logits knows by it where they belong.
        places = torch.arange(size * max(1, window), device=rows.device).view(
            size, *([window] if window else [])
        )
        order = torch.arange(size, device=rows.device)
        parts = [slice(leaf * micro, (leaf + 1) * micro) for leaf in run.leaves]
        leaves = [Micro(rows[part], places[part], order[part]) for part in parts]
        with _caught(run) as caught:
            self._player.play(run.eval_row, leaves, 1.0, None)
        last = [y.shape[-1] for y, _ in caught[:1]] or [0]
        widths = torch.tensor(last, dtype=torch.float64, device=rows.device)
        classes = int(run.mesh.world.all_reduce(widths, dist.ReduceOp.MAX))
        shape = (size,) if not window or at is not None else (size, window)
        out = torch.zeros((*shape, classes), dtype=self._dtype, device=rows.device)
        wanted = None if at is None else torch.cat((at, at.new_full((size - len(at),), -1)))
        for y, here in caught if run.mesh.tp.index == 0 else ():
            _put(out, y.to(self._dtype), here, window, wanted)
        return run.mesh.world.all_reduce(out)[: len(inputs)]


def _put(out: Tensor, logits: Tensor, here: Tensor, window: int, wanted: Tensor | None) -> None:
    """Logits [m, t, classes] or [m, classes] to where their places say that they belong."""
    if not window:
        out[here] = logits
        return
    sample, position = here // window, here % window
    if wanted is None:
        out[sample, position] = logits
        return
    mine = wanted[sample] == position
    out[sample[mine]] = logits[mine]


@contextmanager
def _caught(run: Run) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While it lasts, whoever computes a loss notes the logits, of all classes, and the targets instead."""
    caught: list[tuple[Tensor, Tensor]] = []
    heads = [(stage, stage.loss) for stage in run.local.stages.values() if stage.last]
    for stage, _ in heads:

        def note(y: Tensor, targets: Tensor, whole: Callable[[Tensor], Tensor] = stage.whole) -> Tensor:
            caught.append((whole(y), targets))
            return y.new_zeros(())

        stage.loss = note
    run.local.train(False)
    try:
        yield caught
    finally:
        run.local.train(True)
        for stage, loss in heads:
            stage.loss = loss


def evaluated(function: str, model: PlayedModel) -> dict[str, float]:
    """What a user's `FILE.py:FUNCTION` makes of the model: its numbers by name, one without a name under the
    function's. Raises UsageError C03, UserCodeError."""
    path, _, name = function.rpartition(":")
    evaluate = function_in(function, f"unisono_evaluate_{Path(path).stem}", "train.evaluate")
    try:
        result: Any = evaluate(model)
    except (UsageError, UserCodeError):
        raise
    except Exception as error:
        raise of_user(error, "the evaluation", path) from error
    numbers = result if isinstance(result, Mapping) else {name: result}
    try:
        return {str(key): float(value) for key, value in numbers.items()}
    except (TypeError, ValueError) as error:
        what = f"the evaluation returned {type(result).__name__}, not a number or numbers by name"
        raise UserCodeError(what, where=f"{path}:{name}", fix="return a float, or a dict of them") from error
