"""A user's file that hangs on one rank: a model, a metric and a data source for recipes, and (run as a program) a loop.

`HANG=what:where:rank:turn` says what goes wrong, in which part, on which rank, at which turn there. The line that does
it ends with the name of the fault as a comment, by which `hangs` knows what the error has to show. With `HANG_PATIENT`,
ranks hear whose fault it is and do not leave: somebody is to ask from outside.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.launch.rank.watchdog import Watchdog
from unisono.spec.layout import Anatomy, Split
from unisono.spec.source import SOURCES, DataSource
from unisono.spec.training import Metric

WHAT, WHERE, RANK, TURN = os.environ.get("HANG", "nothing:nowhere:0:0").split(":")
WIDTH = 8
SHARED = ("shapes", "fewer", "dtype", "message")  # faults in which every rank has its part
PATIENT = os.environ.get("HANG_PATIENT")
ONCE = os.environ.get("HANG_ONCE")  # who takes the culprit's place does not hang in its turn
turns: dict[str, int] = {}
if PATIENT:
    Watchdog._obey = lambda *told: None


def due(where: str) -> bool:
    """Whether the fault is due at this turn of this part."""
    if where != WHERE or not dist.is_initialized() or (dist.get_rank() != int(RANK) and WHAT not in SHARED):
        return False
    turns[where] = turns.get(where, 0) + 1
    if turns[where] != int(TURN) or (ONCE and os.path.exists("began")):
        return False
    with open("began", "w") as file:
        file.write(str(time.time()))
    return True


def go_wrong() -> None:
    lock = threading.Lock()
    if WHAT == "sleep":
        time.sleep(1000)  # sleep
    elif WHAT == "lag":
        time.sleep(1)  # less than the deadline: nothing is wrong
    elif WHAT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)  # stop
        time.sleep(1000)  # stop
    elif WHAT == "lock":
        with lock:
            lock.acquire()  # lock
    elif WHAT == "read":
        os.read(os.pipe()[0], 1)  # read
    elif WHAT == "busy":
        while True:  # busy
            pass  # busy
    elif WHAT == "held":
        sum(range(10**11))  # held
    elif WHAT == "barrier":
        dist.barrier()  # barrier
    elif WHAT == "reduce":
        dist.all_reduce(torch.ones(3))  # reduce
    elif WHAT == "shapes":
        dist.all_reduce(torch.ones(3 + 400 * dist.get_rank()))  # shapes
    elif WHAT == "fewer":
        dist.broadcast(torch.ones(3 + 400 * dist.get_rank()), 0)  # fewer
        time.sleep(1000)
    elif WHAT == "dtype":
        dist.all_reduce(torch.ones(3, dtype=[torch.float32, torch.int32][dist.get_rank()]))  # dtype
    elif WHAT == "message":
        if dist.get_rank() == 0:
            dist.send(torch.ones(403), 1)
        else:
            dist.recv(torch.ones(3), 0)  # message
    if PATIENT and WHAT in SHARED:
        time.sleep(1000)


class Stem(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, WIDTH)

    def forward(self, x, noise=None):
        return self.table(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, noise=None):
        if not x.is_meta and due("model"):
            go_wrong()
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.out = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, x):
        return self.out(x)


class Net(nn.Module):
    def __init__(self, vocab, context):
        super().__init__()
        self.stem, self.head = Stem(vocab), Head(vocab)
        self.blocks = nn.ModuleList([Block(), Block()])
        splits = {
            "stem.table": Split.VOCAB_IN, "blocks.*.up": Split.COLUMN, "blocks.*.down": Split.ROW,
            "head.out": Split.VOCAB_OUT,
        }  # fmt: skip
        self.anatomy = Anatomy(splits=splits, divides={"feed-forward": 2 * WIDTH}, sequence=context)

    def loss(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def net(vocab, context):
    return Net(vocab, context)


class Slow(Metric):
    name = "slow"

    def count(self, logits, targets):
        if due("metric"):
            go_wrong()
        return (logits.argmax(-1) == targets).sum()

    def value(self, mean, loss):
        return mean


class Windows:
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def fetch(self, indices):
        if due("data"):
            go_wrong()
        if WHAT == "slow" and os.path.exists("hold"):
            time.sleep(0.2)  # nothing is wrong
        return self.inner.fetch(indices)


class Fed(DataSource):
    name = "fed"
    gives = "tokens"
    worded = True

    def load(self, data, model):
        corpus = SOURCES.read("text:words.txt").load(data, model)
        return replace(corpus, train=Windows(corpus.train))


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        torch.manual_seed(0)
        self.x = torch.randn(96, WIDTH)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if due("data"):
            go_wrong()
        return self.x[index], self.x[index, :2]


def loop(plan: str, timeout: float) -> None:
    job = unisono.init(plan=plan, timeout=timeout, folder=PATIENT)
    passes = 100 if WHAT in ("dtype", "skip", "lag") else 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(Samples(), batch_size=12)
    model, optimizer, data = job.prepare(model, optimizer, data)
    for x, y in (batch for _ in range(passes) for batch in data):
        odd = due("loop")
        if odd:
            go_wrong()
        if odd and WHAT == "break":
            break
        if odd and WHAT == "exit":
            sys.exit(0)
        if odd and WHAT == "skip":
            continue
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()  # backward
        if odd and WHAT == "clip":
            job.clip(1.0)  # clip
        optimizer.step()
        if odd and WHAT == "mean":
            job.mean(loss)  # mean
        if odd and WHAT == "log":
            job.log(loss=loss)  # log
        if odd and WHAT == "save":
            job.save("out")  # save
        if odd and WHAT == "weights":
            job.weights()  # weights


if __name__ == "__main__":
    loop(sys.argv[1], float(sys.argv[2]))
