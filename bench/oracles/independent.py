"""The other side of `check.py`: the same runs by fluke-fl, fedlab and appfl. Knows nothing of this project."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

for _name in ("torchvision", *(f"torchvision.{part}" for part in ("datasets", "transforms", "models"))):
    # Only their data sets want it, and it has no build that fits this torch.
    sys.modules[_name] = MagicMock(__spec__=ModuleSpec(_name, None), __version__="0.0")

from appfl.algorithm.aggregator import FedBuffAggregator  # noqa: E402
from fedlab.contrib.algorithm.basic_server import AsyncServerHandler  # noqa: E402
from fluke.algorithms.fednova import FedNovaClient, FedNovaServer  # noqa: E402
from fluke.algorithms.fedprox import FedProxClient  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.config import OptimizerConfigurator  # noqa: E402
from fluke.server import Server  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

Problem = dict[str, Any]


def network(start: list[float]) -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    nn.utils.vector_to_parameters(torch.tensor(start), module.parameters())
    return module


def flat(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


class Scripted:
    """A data loader that gives one epoch's mini-batches per iteration, in the given order."""

    def __init__(self, problem: Problem, client: int) -> None:
        self.x, self.y = torch.tensor(problem["x"]), torch.tensor(problem["y"])
        self.size = problem["sizes"][client]
        steps = [step for update in problem["orders"][client] for step in update]
        self.n_batches = len(problem["orders"][client][0]) // problem["epochs"]
        self.epochs = iter([steps[i : i + self.n_batches] for i in range(0, len(steps), self.n_batches)])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for rows in next(self.epochs):
            yield self.x[rows], self.y[rows]

    def __len__(self) -> int:
        return self.n_batches


def rounds(problem: Problem, server_class: Any, client_class: Any, momentum: float = 0.0, **hyper: Any) -> list[float]:
    """A synchronous method by fluke's clients and server, all clients in every round."""
    optimizer = OptimizerConfigurator({"name": "SGD", "lr": problem["lr"], "momentum": momentum})
    clients = []
    for index, size in enumerate(problem["sizes"]):
        loader = Scripted(problem, index)
        client = client_class(index, loader, None, optimizer, nn.CrossEntropyLoss(), problem["epochs"], **hyper)
        client.n_examples_ = size
        client._persistency = False  # momentum starts anew in every local update
        clients.append(client)
    type(clients[0]).n_examples = property(lambda self: self.n_examples_)
    server = server_class(network(problem["start"]), None, clients, weighted=True)
    for client in clients:
        client.set_channel(server.channel)
    for number in range(problem["rounds"]):
        server.broadcast_model(clients)
        for client in clients:
            client.local_update(number + 1)
        aggregate(server, clients, list(server.receive_client_models(clients, state_dict=False)))
    return flat(server.model).tolist()


def aggregate(server: Any, clients: list[Any], models: list[nn.Module]) -> None:
    """Fluke's FedNova adds up models with weights that do not sum to 1, which is right for changes: it gets those."""
    if not isinstance(server, FedNovaServer):
        server.aggregate(clients, models)
        return
    before = flat(server.model)
    changes = [deepcopy(model) for model in models]
    for change in changes:
        nn.utils.vector_to_parameters(flat(change) - before, change.parameters())
    server.aggregate(clients, changes)
    nn.utils.vector_to_parameters(before + flat(server.model), server.model.parameters())


def train(problem: Problem, loader: Scripted, start: torch.Tensor) -> torch.Tensor:
    """Plain SGD with torch's own optimiser."""
    module = network(start.tolist())
    optimizer = torch.optim.SGD(module.parameters(), problem["lr"])
    for _ in range(problem["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    return flat(module)


def buffered(problem: Problem, merged: list[list[list[int]]]) -> list[float]:
    """FedBuff by appfl; who arrives when, and from which version, is given."""
    module = network(problem["start"])
    config = OmegaConf.create({
        "K": len(merged[0]), "num_clients": len(merged[0]), "alpha": 1.0, "gradient_based": True,
        "staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}, "optimize_memory": False,
    })  # fmt: skip
    aggregator = FedBuffAggregator(module, config)
    loaders = [Scripted(problem, client) for client in range(len(problem["sizes"]))]
    versions = [flat(module)]
    for number, updates in enumerate(merged):
        for client, age in updates:
            begin = versions[number - age]
            slope = network((begin - train(problem, loaders[client], begin)).tolist())
            aggregator.client_step[client] = number - age
            aggregator.aggregate(client, dict(slope.state_dict()))
        versions.append(flat(module))
    return versions[-1].tolist()


def mixed(problem: Problem, merged: list[list[list[int]]]) -> list[float]:
    """Asynchronous mixing by fedlab, polynomial in the staleness."""
    handler = AsyncServerHandler(network(problem["start"]), len(merged))
    handler.setup_optim(0.6, "polynomial", 0.5)
    loaders = [Scripted(problem, client) for client in range(len(problem["sizes"]))]
    versions = [handler.model_parameters.clone()]
    for number, ((client, age),) in enumerate(merged):
        begin = versions[number - age]
        handler.load([train(problem, loaders[client], begin), torch.Tensor([number - age])])
        versions.append(handler.model_parameters.clone())
    return versions[-1].tolist()


def main(source: Path, target: Path) -> None:
    problem: Problem = json.loads(source.read_text())
    merged = problem["merged"]
    results = {
        "fedavg": ("fluke-fl", rounds(problem, Server, Client)),
        "fedprox": ("fluke-fl", rounds(problem, Server, FedProxClient, mu=0.5)),
        "fednova": ("fluke-fl", rounds(problem, FedNovaServer, FedNovaClient)),
        "fednova with momentum": ("fluke-fl", rounds(problem, FedNovaServer, FedNovaClient, momentum=0.5)),
        "fedbuff": ("appfl FedBuffAggregator", buffered(problem, merged["fedbuff"])),
        "fedsa, first stage": ("fedlab AsyncServerHandler", mixed(problem, merged["fedsa, first stage"])),
    }
    target.write_text(json.dumps({case: {"by": by, "final": final} for case, (by, final) in results.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
