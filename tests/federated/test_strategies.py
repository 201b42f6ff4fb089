"""Servers' formulas, by hand and against torch; corrections of clients."""

import pytest
import torch
from torch import Tensor

from unisono_contrib.federated.strategies import scaffold
from unisono_contrib.spec.federated import STRATEGIES, LocalWork
from unisono_contrib.sync._rounds import nesterov

DELTAS = [torch.tensor(x, dtype=torch.float64) for x in ([1.0, -2.0, 0.5], [0.5, 1.0, -4.0], [3.0, 0.0, 1.0])]


def played(text: str) -> list[Tensor]:
    """What is added to the weights in each of three rounds."""
    strategy = STRATEGIES.read(text)
    kept = {n: torch.full((3,), strategy.initial(n), dtype=torch.float64) for n in strategy.server_keeps}
    return [strategy.step(delta.clone(), kept).clone() for delta in DELTAS]


@pytest.mark.parametrize("text", ["fedadam", "fedyogi", "fedadagrad:beta1=0.9,lr=0.1"])
def test_adaptive_servers_are_as_the_paper_has_them(text: str) -> None:
    """Reddi et al. 2021, algorithm 2, element by element in plain numbers: no bias correction, m from the delta."""
    name = text.partition(":")[0]
    lr, b1, b2, tau = {"fedyogi": 0.01}.get(name, 0.1), 0.9, 0.99, 1e-3
    steps = played(text)
    for i in range(3):
        m, v = 0.0, tau**2
        for n, step in enumerate(steps):
            d = float(DELTAS[n][i])
            m = b1 * m + (1 - b1) * d
            if name == "fedadam":
                v = b2 * v + (1 - b2) * d * d
            elif name == "fedyogi":
                v -= (1 - b2) * d * d * (1.0 if v > d * d else -1.0 if v < d * d else 0.0)
            else:
                v += d * d
            assert float(step[i]) == pytest.approx(lr * m / (v**0.5 + tau), rel=1e-12)


@pytest.mark.parametrize("lr,momentum", [(0.7, 0.9), (1.0, 0.0), (0.5, 0.5)])
def test_dilocos_server_is_its_outer_optimiser(lr: float, momentum: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer, before = nesterov(lr, momentum)([weight]), torch.zeros(3, dtype=torch.float64)
    for delta, step in zip(
        DELTAS, played(f"outer_nesterov:outer_lr={lr},outer_momentum={momentum}"), strict=True
    ):
        weight.grad = -delta
        optimizer.step()
        assert torch.allclose(weight.detach() - before, step, rtol=1e-12, atol=0)
        before = weight.detach().clone()


def test_fedavgm_keeps_its_velocity() -> None:
    assert torch.allclose(played("fedavgm:beta=0.5,lr=2")[1], 2 * (0.5 * DELTAS[0] + DELTAS[1]))


def test_a_fedprox_client_is_pulled_back_by_mu() -> None:
    weights, start = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])
    pull = STRATEGIES.read("fedprox:0.5").pull(weights, start, {}, {})
    assert pull is not None and pull.tolist() == [1.0, 0.0]


def test_scaffold_on_two_quadratics_reaches_the_optimum_that_fedavg_misses() -> None:
    """Clients f_i(w) = a_i/2 (w - b_i)², five local steps: FedAvg has another fixed point than the sum's optimum."""
    slopes, centers, lr, steps = (1.0, 4.0), (0.0, 1.0), 0.1, 5

    def optimum_by(text: str) -> float:
        strategy = STRATEGIES.read(text)
        kept = {name: torch.zeros(1, dtype=torch.float64) for name in strategy.server_keeps}
        own = [{n: torch.zeros(1, dtype=torch.float64) for n in strategy.client_keeps} for _ in slopes]
        w = torch.full((1,), 5.0, dtype=torch.float64)
        for _ in range(300):
            sent = {name: kept[name].clone() for name in strategy.sends}
            deltas, growth = [], []
            for a, b, mine in zip(slopes, centers, own, strict=True):
                y = w.clone()
                for _ in range(steps):
                    pull = strategy.pull(y, w, sent, mine)
                    y -= lr * (a * (y - b) + (0.0 if pull is None else pull))
                grown = strategy.learn(LocalWork(y, w, lr * steps, sent, mine))
                for name, x in grown.items():
                    mine[name] += x
                deltas.append(y - w)
                growth.append(grown)
            strategy.hear({n: [g[n] for g in growth] for n in strategy.client_keeps}, len(slopes), kept)
            w = w + strategy.step(torch.stack(deltas).mean(0), kept)
        return float(w)

    assert optimum_by("scaffold") == pytest.approx(0.8, abs=1e-9)
    assert abs(optimum_by("fedavg") - 0.8) > 0.02
    assert scaffold.CONTROL in STRATEGIES.read("scaffold").sends


def test_a_variate_becomes_the_mean_gradient_and_the_server_has_the_mean_of_all_clients() -> None:
    """Option II of the paper; the server's grows by the sum over who has answered, divided by all clients there are."""
    strategy, gradients, lr = STRATEGIES.read("scaffold"), DELTAS, 0.1
    server, mine = torch.full((3,), 0.5, dtype=torch.float64), torch.full((3,), -0.25, dtype=torch.float64)
    start = torch.ones(3, dtype=torch.float64)
    weights = start - lr * sum(g - mine + server for g in gradients)
    work = LocalWork(weights, start, 3 * lr, {"control": server}, {"control": mine})
    grown = strategy.learn(work)["control"]
    assert torch.allclose(mine + grown, torch.stack(gradients).mean(0), rtol=1e-12)
    kept = {"control": server.clone()}
    strategy.hear({"control": [grown, grown]}, 8, kept)
    assert torch.allclose(kept["control"], server + 2 * grown / 8, rtol=1e-12)


def test_old_deltas_count_for_less() -> None:
    strategy = STRATEGIES.read("fedbuff")
    assert [strategy.share(n) for n in (0, 3)] == [1.0, 0.5]
