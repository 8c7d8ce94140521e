"""FedAvg by Flower's simulation on Ray, one core for each client that runs."""

# mypy: ignore-errors
# (what it imports is in an environment of its own)

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F
from work import Clock, given, kept, lenet


def client_app(work):
    app = ClientApp()

    @app.train()
    def train(message, context):
        net, x, y = kept(work.data)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        begin = context.node_config["partition-id"] * work.samples
        optimizer = torch.optim.SGD(net.parameters(), lr=work.lr)
        for rows in (begin + torch.randperm(work.samples)).split(work.batch):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
        arrays, metrics = ArrayRecord(net.state_dict()), MetricRecord({"num-examples": work.samples})
        return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def server_app(work, clock, net):
    class Timed(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            assert len(replies) == work.clients and not any(reply.has_error() for reply in replies)
            found = super().aggregate_train(server_round, replies)
            clock.end_of_round()
            return found

    app = ServerApp()

    @app.main()
    def main(grid, context):
        everyone = {"min_train_nodes": work.clients, "min_available_nodes": work.clients}
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, **everyone)
        clock.begin()
        strategy.start(grid=grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=work.all_rounds)

    return app


if __name__ == "__main__":
    work = given()
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server_app(work, Clock(work), lenet()),
        client_app(work),
        num_supernodes=work.clients,
        backend_config={
            "client_resources": resources,
            "init_args": {"num_cpus": work.cores, "include_dashboard": False},
        },
    )
