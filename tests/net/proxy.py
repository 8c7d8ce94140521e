"""A stretch of network that can be cut: forwards TCP connections on this machine until it is told not to."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Proxy:
    """Listens on a port of its own and forwards to the target, while it is not cut."""

    def __init__(self) -> None:
        self.target = 0
        self.cut = False
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.cut or not self.target:
            writer.close()
            return
        with suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers |= {writer, back}
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        self._writers.discard(writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()
        self._writers.discard(writer)

    def break_off(self) -> None:
        """Ends every connection, and lets none through until it is mended."""
        self.cut = True
        for writer in tuple(self._writers):
            writer.transport.abort()

    def mend(self) -> None:
        self.cut = False

    async def close(self) -> None:
        self.break_off()
        self._server.close()
