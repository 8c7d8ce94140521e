"""FedAvg by pfl-research; several processes when started by torchrun."""

# mypy: ignore-errors
# (what it imports is in an environment of its own)

from __future__ import annotations

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional as F
from work import Clock, data, given, lenet, share

work = given()
clock = Clock(work)
x, y = data(work.data)


class Rounds(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if pytorch_ops.distributed.global_rank == 0:
            clock.end_of_round()
        return False, Metrics()


net = lenet()
net.loss = lambda x, y: F.cross_entropy(net(x), y)
net.metrics = lambda x, y: {"loss": Weighted(F.cross_entropy(net(x), y).item() * len(y), len(y))}
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
users = FederatedDataset(
    lambda user: Dataset((x[share(work, user)], y[share(work, user)])),
    get_user_sampler("minimize_reuse", list(range(work.clients))),
)
never = 1 + work.all_rounds
algorithm = FederatedAveraging()
algorithm._current_central_iteration = 1  # the first iteration would evaluate every user twice
clock.begin()
algorithm.run(
    NNAlgorithmParams(1 + work.all_rounds, never, work.clients, None),
    SimulatedBackend(users, users),
    model,
    NNTrainHyperParams(work.batch, 1, work.lr),
    callbacks=[Rounds()],
    send_metrics_to_platform=False,
)
