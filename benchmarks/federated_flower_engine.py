"""Rounds of Flower's own simulation engine (ray) on the split and the weights of `benchmarks/federated.py`.

Run by a Python that has `flwr[simulation]` and torch. stdin: an .npz of inputs, targets, the samples of each client,
the first weights and settings. stdout: one JSON object with the accuracy and the seconds of each round. Clients train
by plain torch: SGD, the batches of a pass in a drawn order, a fresh optimiser each time.
"""

import io
import json
import sys
import time

import numpy as np
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

GIVEN = dict(np.load(io.BytesIO(sys.stdin.buffer.read())))  # arrays, which travel to ray's workers
SAID = json.loads(str(GIVEN["settings"]))
torch.set_num_threads(1)


def model_of(weights: list[np.ndarray]) -> nn.Module:
    """Linear layers with GELU or ReLU between, as the first weights have their shapes: matrix, bias, matrix, bias."""
    layers: list[nn.Module] = [nn.Flatten()]
    for matrix, bias in zip(weights[::2], weights[1::2], strict=True):
        layers += [nn.Linear(matrix.shape[1], matrix.shape[0]), nn.GELU()]
        layers[-2].load_state_dict({"weight": torch.tensor(matrix), "bias": torch.tensor(bias)})
    return nn.Sequential(*layers[:-1])


class DigitsClient(NumPyClient):
    def __init__(self, number: int) -> None:
        mine = GIVEN[f"client{number}"]
        self.inputs, self.targets = torch.tensor(GIVEN["inputs"][mine]), torch.tensor(GIVEN["targets"][mine])

    def fit(self, parameters, config):
        model = model_of(parameters)
        optimizer, count = torch.optim.SGD(model.parameters(), lr=SAID["lr"]), len(self.targets)
        for _ in range(SAID["epochs"]):
            for rows in torch.randperm(count).split(SAID["batch"]):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(self.inputs[rows]), self.targets[rows]).backward()
                optimizer.step()
        return [p.detach().numpy() for p in model.parameters()], count, {}


def main() -> None:
    first, marks, accuracies = [GIVEN[f"weight{i}"] for i in range(SAID["weights"])], [], []

    def evaluated(number, parameters, config):
        marks.append(time.perf_counter())
        with torch.no_grad():
            said = model_of(parameters)(torch.tensor(GIVEN["val_inputs"])).argmax(1).numpy()
        accuracies.append(float((said == GIVEN["val_targets"]).mean()))
        return 0.0, {}

    def server(context: Context) -> ServerAppComponents:
        strategy = FedAvg(
            accept_failures=False, fraction_fit=SAID["participation"], fraction_evaluate=0.0,
            min_available_clients=SAID["clients"],
            initial_parameters=ndarrays_to_parameters(first), evaluate_fn=evaluated,
        )  # fmt: skip
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=SAID["rounds"]))

    def client(context: Context):
        return DigitsClient(int(context.node_config["partition-id"])).to_client()

    run_simulation(ServerApp(server_fn=server), ClientApp(client_fn=client), SAID["clients"],
                   backend_config={"client_resources": {"num_cpus": 1}})  # fmt: skip
    print(json.dumps({"accuracies": accuracies, "seconds": np.diff(marks).tolist()}))


if __name__ == "__main__":
    main()
