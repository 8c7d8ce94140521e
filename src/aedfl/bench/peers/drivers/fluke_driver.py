"""FedAvg by fluke."""

# mypy: ignore-errors
# (what it imports is in an environment of its own)

from __future__ import annotations

from work import CLASSES, Clock, data, given, lenet, share, without_torchvision

without_torchvision()

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.config import OptimizerConfigurator  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402
from fluke.server import Server  # noqa: E402
from fluke.utils import FederationObserver  # noqa: E402
from torch import nn  # noqa: E402

work = given()
clock = Clock(work)
x, y = data(work.data)
environment = FlukeENV()
environment.set_seed(0)
environment.set_device("cpu")
environment.set_inmemory(True)
environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)


class Rounds(FederationObserver):
    def end_round(self, round):
        clock.end_of_round()


optimizer = OptimizerConfigurator(DDict(name="SGD", lr=work.lr), DDict(name="StepLR", step_size=1, gamma=1))
clients = [
    Client(
        index,
        FastDataLoader(
            x[share(work, index)], y[share(work, index)], num_labels=CLASSES, batch_size=work.batch, shuffle=True
        ),
        None,
        optimizer,
        nn.CrossEntropyLoss(),
        local_epochs=1,
    )
    for index in range(work.clients)
]
federation = FedAVG(work.clients, None, DDict(), clients, Server(lenet(), None, clients, weighted=True))
federation.set_callbacks(Rounds())
clock.begin()
federation.run(n_rounds=work.all_rounds, eligible_perc=1.0)
