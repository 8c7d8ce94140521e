"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, *Communication-efficient learning of deep networks from
decentralized data*, AISTATS 2017.

In every round the clients train the server's model, and the server takes the mean of what comes back,
`w = sum_k n_k/n w_k`. All clients take part by default, which is the strongest form here; the paper's share C is an
option. Adapted: a client that crashes is left out after a while instead of stopping the round for good.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..context import Context, Method, option
from ._server import MESSAGES, averaging_rounds, training_client


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedAvg."""

    share: float = option(1.0, "share of the clients that take part in a round (the paper's C)")


async def server(ctx: Context, hyper: Hyper) -> None:
    await averaging_rounds(ctx, hyper.share)


METHOD = Method(
    "fedavg", "synchronous mean of the models", Hyper(), training_client, server, "McMahan et al., AISTATS 2017",
    messages=MESSAGES,
)  # fmt: skip
