"""One connection of the line protocol: whole lines out, commands in, both under deadlines.

Used by server and client. Nothing is queued here: a task that sends waits until the system has
taken the bytes, and a peer that does not take them in time is disconnected.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable

import trio

from fedsender.replication.commands import Vocabulary
from fedsender.replication.endpoint import Disconnected
from fedsender_relay.protocol import Auth, Command, Connection, Error, File, Ping

# Something is sent this often; it is also what Synapse does.
PING_EVERY_S = 5.0
# Silence after which a peer is taken for dead, once it has sent a PING.
DEAD_S = 15.0
# For one piece of at most SEND_PIECE bytes.
SEND_S = 30.0
SEND_PIECE = 65_536
RECEIVE_PIECE = 65_536


class TooSlow(Disconnected):
    """The peer did not take the sent bytes in time."""


class Wire:
    """A stream that carries commands.

    Several tasks may `send`; one may wait in `next_command`. After Disconnected, or a cancelled
    `send`, it can only be closed.
    """

    def __init__(self, stream: trio.abc.Stream, now_ms: Callable[[], int]) -> None:
        self._stream = stream
        self._connection = Connection()
        self._now_ms = now_ms
        self._sending = trio.Lock()
        self._last_sent = self._last_heard = trio.current_time()
        self._armed = False
        # Half a line may be out, or the last one is: nothing that we add would be read.
        self._torn = False
        self._too_slow = False
        # What we proved ourselves with: a peer that quotes it is not to bring it into our log.
        self._secret: str | None = None

    def speak(self, dialect: Vocabulary[Command]) -> None:
        """Read the peer's next lines in this dialect."""
        self._connection.dialect = dialect

    def encode(self, command: Command) -> bytes:
        """The line of a command; raises UnsendableCommand."""
        return self._connection.encode(command)

    async def send(self, *commands: Command) -> None:
        """Send commands. Raises Disconnected; UnsendableCommand before anything is sent."""
        for command in commands:
            if isinstance(command, Auth):
                self._secret = command.secret
        await self.send_lines(b"".join(map(self.encode, commands)))

    async def send_lines(self, lines: bytes | bytearray) -> None:
        """Send whole lines, made by `encode`; raises Disconnected."""
        async with self._sending:
            await self._transmit(lines)
            self._torn = False

    async def send_file(self, file: File, pieces: AsyncIterable[bytes]) -> None:
        """Send `file` and the bytes that it announces, and nothing in between.

        Raises Disconnected, and the errors of `pieces`: no more can be sent then.
        """
        async with self._sending:
            await self._transmit(self.encode(file))
            async for piece in pieces:
                self._torn = False
                await self._transmit(piece)
            self._torn = False

    async def send_last(self, command: Command) -> None:
        """Send a command, and nothing after it; raises as `send` does."""
        async with self._sending:
            await self._transmit(self.encode(command))

    async def next_command(self) -> Command:
        """Wait for the peer's next command.

        Raises BadLine, and Disconnected: also when a peer that has sent a PING is silent for too
        long. Only silence while we listen counts, and any byte ends it: a long line may be slow.
        """
        while (command := self.buffered_command()) is None:
            await self._read()
        return command

    async def next_piece(self, most: int) -> bytes:
        """Wait for 1 to `most` of the raw bytes that follow a `File`; raises Disconnected."""
        while not (piece := self._connection.take_raw(most)):
            await self._read()
        return piece

    def buffered_command(self) -> Command | None:
        """The peer's next command if it is here already; raises BadLine."""
        command = self._connection.next_command()
        self._armed |= isinstance(command, Ping)
        if isinstance(command, Error) and self._secret:
            return Error(command.text.replace(self._secret, "[hidden]"))
        return command

    async def keep_alive(self) -> None:
        """Send a PING at once and whenever nothing else was sent for a while; never return.

        Raises Disconnected.
        """
        await self.send(Ping(str(self._now_ms())))
        while True:
            due = self._last_sent + PING_EVERY_S
            if trio.current_time() < due:
                # sleep_until, not sleep: for a tiny rest, rounding could make us spin for ever.
                await trio.sleep_until(due)
            else:
                await self.send(Ping(str(self._now_ms())))

    def silent_s(self) -> float:
        """For how long nothing has come from the peer, in seconds."""
        return trio.current_time() - self._last_heard

    async def aclose(self) -> None:
        """Close at once; tasks that wait on the wire get Disconnected."""
        self._torn = True
        await trio.aclose_forcefully(self._stream)

    async def _transmit(self, data: bytes | bytearray) -> None:
        if self._torn:
            raise Disconnected("the connection is closed")
        self._torn = True
        view = memoryview(data)
        try:
            for start in range(0, len(view), SEND_PIECE):
                with trio.fail_after(SEND_S):
                    await self._stream.send_all(view[start : start + SEND_PIECE])
        except trio.TooSlowError as slow:
            # Whoever reads finds the connection closed, and may be the first to say so.
            self._too_slow = True
            await self.aclose()
            raise self._gone() from slow
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            await self.aclose()
            raise self._gone() from error
        self._last_sent = trio.current_time()

    def _gone(self) -> Disconnected:
        if self._too_slow:
            return TooSlow(f"nothing was taken for {SEND_S:.0f} s")
        return Disconnected("the connection broke")

    async def _read(self) -> None:
        patience = DEAD_S if self._armed else float("inf")
        try:
            with trio.fail_after(patience):
                data = await self._stream.receive_some(RECEIVE_PIECE)
        except trio.TooSlowError as slow:
            raise Disconnected("ping timeout") from slow
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._gone() from error
        if not data:
            raise Disconnected("the peer closed the connection")
        self._last_heard = trio.current_time()
        self._connection.receive_data(bytes(data))
