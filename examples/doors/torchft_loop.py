"""A loop as it is written against torchft's Manager. Worker 1 of three is killed in step 3, and another joins.

python examples/doors/torchft_loop.py
"""

import os
import signal
from pathlib import Path

import torch
from small_gpt import GPT, GPTConfig

from unisono.launch.fork_server import ForkServer
from unisono.library.manager import ManagedOptimizer, Manager

STEPS = 6


def train(context, argument, shared):
    """What each worker runs."""
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    model.init_weights()
    manager = Manager(context, model.load_state_dict, model.state_dict)
    optimizer = ManagedOptimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-2))
    manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)
    is_new = context.rendezvous is not None
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        step = manager.current_step()
        tokens = torch.randint(
            256, (4, 17), generator=torch.Generator().manual_seed(10 * step + context.rank)
        )
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        if context.rank == 1 and step == 3 and not is_new:
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        if context.rank == 0 and manager.current_step() > step:
            print(f"step {step}: {manager.num_participants()} workers, loss {loss.item():.4f}")
    manager.shutdown()
    return {"sum": sum(p.double().sum().item() for p in model.parameters())}


if __name__ == "__main__":
    with ForkServer("torchft_loop:train", [str(Path(__file__).parent)]) as server:
        sums = [result["sum"] for result in server.run({}, 3, recovers=True).returned()]
    assert len(set(sums)) == 1
    print("all workers have the same weights")
