"""FedBuff: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, *Federated learning with buffered asynchronous
aggregation*, AISTATS 2022.

Clients train all the time, each from the newest model when it begins. The server collects the changes
`D_k = w_k - w_start` of K arrivals and takes `w += lr_g 1/K sum_k D_k / sqrt(1 + tau_k)`, where `tau_k` is how many
versions went by while the client trained. Adapted: no differential privacy, no momentum at the server; every client
is always at work, where the paper samples them; running statistics (BatchNorm) are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..context import Context, Method, option
from ._server import MESSAGES, Desk, Update, training_client


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedBuff."""

    buffer: int = option(10, "arrivals per server update (the paper's K)")
    lr: float = option(1.0, "the server's learning rate")


def factors(ages: list[int], lr: float) -> list[float]:
    """`lr / (K sqrt(1 + tau))` of every change in the buffer."""
    return [float(lr / (len(ages) * (1 + age) ** 0.5)) for age in ages]


async def server(ctx: Context, hyper: Hyper) -> None:
    desk = Desk.open(ctx)
    buffer: list[Update] = []
    while (update := await desk.update()) is not None:
        buffer.append(update)
        if len(buffer) >= hyper.buffer:
            weights = factors([desk.version - one.version for one in buffer], hyper.lr)
            await desk.step(buffer, weights)
            buffer = []
        desk.hand(update.client)


METHOD = Method(
    "fedbuff", "asynchronous, in buffers of K changes", Hyper(), training_client, server, "Nguyen et al., AISTATS 2022",
    messages=MESSAGES,
)  # fmt: skip
