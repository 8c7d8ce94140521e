"""A call that stays open: small messages go over it, those that wait together, and receipts come back for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from .post import HAND
from .protocol_pb2 import Receipt, Receipts

STALL = 30.0
"""Seconds without progress after which a transfer is given up and begun anew."""


class Line:
    """One sender's line to one receiver."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = channel.stream_stream(HAND, None, Receipts.FromString)()

    async def hand(self, piece: bytes) -> Sequence[Receipt]:
        """The receipts of the messages in it, none behind one that is put off; none at all if the line has ended."""
        try:
            async with asyncio.timeout(STALL):
                await self._call.write(piece)
                answer = await self._call.read()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return ()
        except TimeoutError:
            self._call.cancel()
            raise
        return () if answer is grpc.aio.EOF else list(answer.receipts)

    async def end(self) -> str:
        """Why it has ended, in gRPC's words; ends it if it has not."""
        self._call.cancel()
        return str(await self._call.details() or "the receiver hung up")
