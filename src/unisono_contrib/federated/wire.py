"""A delta as its client's codec sends it, and back.

A codec's exchange among replicas is played by each client alone: it yields what it would have added up or gathered,
which is what the client sends. The server plays the same exchange with no delta of its own, and answers with what came.
Where replicas deal parts of the sum out and gather them, the dealing alone is sent: the server has the sum.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Size, Tensor

from unisono.codecs import CODECS, BucketMemory, Coder, Deal, Gather, Sent, Sum
from unisono.codecs._watched import bound


class DeltaCodec:
    """The codec of one run. shapes: of the parameters. What clients keep, such as what they have not sent yet, is by
    `NAME` of `Coder.keeps` [d], and `PARAMETER/NAME` of what both sides keep alike."""

    def __init__(self, text: str, named: Mapping[str, Tensor], seed: int) -> None:
        self._coder: Coder = bound(CODECS.read(text))
        self._coder.seed = seed
        self._named, self.shapes = named, [x.shape for x in named.values()]

    def initial(self) -> dict[str, Tensor]:
        """What a client keeps before it has sent anything."""
        numel = sum(shape.numel() for shape in self.shapes)
        like = next(iter(self._named.values()))
        alike = {
            f"{name}/{key}": x.clone()
            for name, p in self._named.items()
            for key, x in self._coder.alike(name, p).items()
        }
        return {**{key: like.new_zeros(numel) for key in self._coder.keeps}, **alike}

    def encode(self, delta: Tensor, kept: Mapping[str, Tensor], number: int) -> list[Tensor]:
        """What is sent of a delta [d], which may be overwritten. kept: by this client, changed in place. number: of
        the task, by which both sides draw alike."""
        return self._play(delta, kept, number, None)[0]

    def decode(self, parts: Sequence[Tensor], kept: Mapping[str, Tensor], number: int) -> Tensor:
        """The delta [d] that `encode` has sent. kept: by the server of this client, changed in place. Raises ValueError
        for what no `encode` has sent."""
        like = next(iter(self._named.values()))
        nothing = like.new_zeros(sum(shape.numel() for shape in self.shapes))
        return self._play(nothing, kept, number, iter(parts))[1]

    @torch.no_grad()
    def _play(
        self, delta: Tensor, kept: Mapping[str, Tensor], number: int, came: Iterator[Tensor] | None
    ) -> tuple[list[Tensor], Tensor]:
        """(what is sent, what is decoded). came: what a client has sent, in the place of what is here."""
        alike = [
            {key.rpartition("/")[2]: x for key, x in kept.items() if key.rpartition("/")[0] == name}
            for name in self._named
        ]
        whole = {key: kept[key] for key in self._coder.keeps}
        memory = BucketMemory(whole, alike, tuple(self._named), number, self._coder.seed, 0, 1)
        exchange = self._coder.exchange(delta, [Size(shape) for shape in self.shapes], memory)
        sent: list[Tensor] = []
        answer, dealt, rest = None, False, came
        while True:
            try:
                request = exchange.send(answer)
            except StopIteration as end:
                if rest is not None and next(rest, None) is not None:
                    raise ValueError("what came is more than a delta of this codec") from None
                return sent, end.value.clone()
            if isinstance(request, Sent):
                answer = None
                continue
            several = request if isinstance(request, tuple) else (request,)
            log, source = ([], None) if dealt else (sent, rest)  # both sides have what follows a dealing
            answers = tuple(self._answer(each, log, source) for each in several)
            dealt = dealt or any(isinstance(each, Deal) for each in several)
            answer = answers if isinstance(request, tuple) else answers[0]

    @staticmethod
    def _answer(request: object, sent: list[Tensor], came: Iterator[Tensor] | None) -> Tensor:
        """Among replicas of which there is one, each request is answered by its own tensor."""
        mine: Tensor = request.tensor  # type: ignore[attr-defined]
        theirs = mine if came is None else next(came, None)
        if (
            theirs is None
            or theirs.dtype != mine.dtype
            or (isinstance(request, Sum) and theirs.shape != mine.shape)
        ):
            raise ValueError("what came is no delta of this codec")
        sent.append(theirs.clone())  # what lies there may be written over
        if isinstance(request, Sum):
            return mine.copy_(theirs)
        rows = theirs.reshape(1, -1)
        into = request.into if isinstance(request, Gather) else None
        return rows if into is None else into.copy_(rows.reshape(into.shape)).view(1, -1)
