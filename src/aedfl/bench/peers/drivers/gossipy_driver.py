"""Gossip learning by gossipy: in a round every node sends once, and whoever receives merges and trains an epoch."""

# mypy: ignore-errors
# (what it imports is in an environment of its own)

from __future__ import annotations

from work import Clock, data, given, lenet, without_torchvision

without_torchvision()

import torch  # noqa: E402
from gossipy.core import AntiEntropyProtocol, StaticP2PNetwork  # noqa: E402
from gossipy.data import DataDispatcher  # noqa: E402
from gossipy.data.handler import ClassificationDataHandler  # noqa: E402
from gossipy.model import TorchModel  # noqa: E402
from gossipy.model.handler import TorchModelHandler  # noqa: E402
from gossipy.node import GossipNode  # noqa: E402
from gossipy.simul import GossipSimulator, SimulationEventReceiver  # noqa: E402
from torch.nn import functional as F  # noqa: E402

TICKS = 10
work = given()
clock = Clock(work)
x, y = data(work.data)


class Net(TorchModel):
    def __init__(self):
        super().__init__()
        self.net = lenet()

    def init_weights(self):
        pass

    def forward(self, x):
        return self.net(x)


class Rounds(SimulationEventReceiver):
    def update_message(self, failed, msg=None):
        pass

    def update_end(self):
        pass

    def update_timestep(self, t):
        if (t + 1) % TICKS == 0:
            clock.end_of_round()


handler = TorchModelHandler(Net(), torch.optim.SGD, {"lr": work.lr}, F.cross_entropy, batch_size=work.batch)
dispatcher = DataDispatcher(
    ClassificationDataHandler(x, y, x[:0], y[:0], test_size=0), n=work.clients, eval_on_user=False
)
nodes = GossipNode.generate(dispatcher, StaticP2PNetwork(work.clients), handler, TICKS, sync=True)
simulator = GossipSimulator(nodes, dispatcher, TICKS, AntiEntropyProtocol.PUSH)
simulator.add_receiver(Rounds())
simulator.init_nodes(seed=0)
clock.begin()
simulator.start(n_rounds=work.all_rounds)
