"""TLS over a socket: bytes in and out of OpenSSL's memory, with as few steps of Trio as possible.

`trio.SSLStream` runs over any stream, with a lock and several checkpoints for each piece. Here the
stream is a socket of ours, which is asked only when OpenSSL has nothing left to say: half the CPU
time for each exchange.

OpenSSL does not read from the socket itself. A peer that sends key updates without end would keep
it in one call for ever; from memory it takes only the bytes that it was given, which are counted.
"""

import _ssl
import ctypes
import math
import operator
import re
import socket
import ssl
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from fedsender.fairness import Payer, Turns, Usual

T = TypeVar("T")

# The new one comes with a share of its own in the first message, beside the one of X25519.
_POST_QUANTUM: Final = "*X25519MLKEM768:*" if ssl.OPENSSL_VERSION_INFO >= (3, 5) else ""
GROUPS: Final = _POST_QUANTUM + "X25519:P-256:P-384"
"""What we offer a server, because it chooses, and with that the cost of the handshake: 4 ms at most
with these, 18 ms with `ffdhe4096` and 130 ms with `ffdhe8192`."""

MAX_HANDSHAKE_CPU_S = 0.05
"""The usual groups take 4 ms. The certificates may cost more than the group."""


MAX_HANDSHAKE_BYTES = 32_768
"""The usual chains of certificates take 5 KiB; 100 KiB of chosen keys, 390 ms of the loop."""


MAX_TLS_RECORDS = 8
"""The records without data between two requests: usually two, with session tickets. Each update of
a key takes 25 us of the loop, and 27 bytes of a server."""


MAX_TLS_BYTES = 8_192
"""The bytes of those records, as one may hold many tickets: usually 2 KiB."""


SMALL_PIECE_BYTES = 512
"""A segment of TCP has 536 at least, unless it is the last of what is sent."""


MAX_SMALL_PIECES = 256
"""The pieces smaller than that, between two requests: usually a few, and four for each PDU where a
server sends its JSON token by token. Each wakes a task, which takes 60 us of the loop, and 22 bytes
of a server."""


TLS_PIECE_BYTES = 256
"""Counted for each piece of a handshake that completes no record, because it wakes a task, too."""

# SSL_CTRL_SET_GROUPS_LIST of OpenSSL's ssl.h.
_SET_GROUPS_LIST: Final = 92
# SSL3_RT_HANDSHAKE and SSL3_MT_CERTIFICATE of ssl3.h.
_HANDSHAKE: Final = 22
_CERTIFICATE: Final = 11
# SSL_OP_NO_RX_CERTIFICATE_COMPRESSION of ssl.h, from 3.2 on; others ignore it.
_NO_COMPRESSED_CERTIFICATES: Final = 1 << 33
# The identifier of each kind of field, 1.2.840.10045.1 (RFC 3279, section 2.3.5): a key has it only
# if it brings a curve of its own. However it is encoded, these bytes stay together.
_OWN_CURVE: Final = b"\x2a\x86\x48\xce\x3d\x01"
# The identifier of CRL distribution points, 2.5.29.31, with the last byte of its size; and what
# follows in DER: whether it is critical, and the tag and the size of what it says.
_CRL_POINTS: Final = re.compile(rb"\x03\x55\x1d\x1f")
_CRL_POINTS_SAY: Final = re.compile(
    rb"(?:\x01\x01.)?\x04(?:([\x00-\x7f])|\x81(.)|\x82(..))", re.DOTALL
)
# With each name that is relative to the issuer, OpenSSL copies the issuer's name. Their tag is 1.
_MAX_RELATIVE: Final = 8
_TAG_1: Final = b"\xa1\xbf"
# The data of one record of ours: the largest that there is (RFC 8446, section 5.1).
_RECORD_BYTES: Final = 16_384
# So much is given to the kernel at a time.
_AT_ONCE_BYTES: Final = 65_536
# The largest record of a peer (RFC 8446, section 5.1), with its header and its seal.
_RECEIVE_BYTES: Final = 16_384 + 512


def client_context(
    cafile: str | Path | None = None, capath: str | Path | None = None
) -> ssl.SSLContext:
    """A context that trusts these authorities (PEM), by default those of the system.

    What OpenSSL accepts, and so Synapse, is accepted on each Python. From 3.13 on, Python's own
    context refuses authorities without a key usage, which `openssl req -x509` makes.
    Raises OSError and ssl.SSLError for files that cannot be used.
    """
    context = ssl.create_default_context(cafile=cafile, capath=capath)
    context.verify_flags = ssl.VERIFY_X509_TRUSTED_FIRST
    return context


def server_context() -> ssl.SSLContext:
    """A context for a listener of ours, still without a certificate. Before it has proved anything
    a client can have us do neither a dear exchange of keys nor many updates of them."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.sslobject_class = ServedTls
    context.options |= ssl.OP_NO_RENEGOTIATION
    set_groups(context, GROUPS)
    return context


def set_groups(context: ssl.SSLContext, groups: str) -> bool:
    """Have TLS agree on none but these groups; False: this Python has no way to.

    Python has a method for it from 3.15 on. Before that we hand OpenSSL the list ourselves. A file
    named by OPENSSL_CONF would replace the system's.
    """
    if hasattr(context, "set_groups"):
        context.set_groups(groups)
        return True
    control = _openssl("SSL_CTX_ctrl", ctypes.c_int, ctypes.c_long, ctypes.c_char_p)
    if control is None:
        return False
    return bool(control(_openssls(context), _SET_GROUPS_LIST, 0, groups.encode()) == 1)


def refuse_dear_certificates(context: ssl.SSLContext) -> bool:
    """Take no certificates that are dear to read (`is_dear`); False: we have no way to.

    OpenSSL reads all certificates before it checks the first, has no setting for that, and takes
    seconds for 30 KB. But it shows each message before it reads it.
    """
    context.options |= _NO_COMPRESSED_CERTIFICATES
    show = _openssl("SSL_CTX_set_msg_callback", ctypes.c_void_p)
    if show is None or _look_at is None:
        return False
    show(_openssls(context), _look_at)
    return True


def is_dear(certificates: bytes) -> bool:
    """Whether OpenSSL may take long to read these certificates, in DER, in any message.

    A key that brings a curve of its own has a compressed point, whose square root takes up to 0.5 s
    on a curve that was chosen for that; no authority issues it (RFC 5480, section 2.1.1). And CRL
    distribution points whose names are relative to the issuer copy its name; RFC 5280 (section
    4.2.1.13) advises against one, and there may be a thousand.
    """
    if _OWN_CURVE in certificates:
        return True
    for found in _CRL_POINTS.finditer(certificates):
        say = _CRL_POINTS_SAY.match(certificates, found.end())
        if say is None:
            return True
        size = int.from_bytes(say[say.lastindex or 0], "big")
        points = certificates[say.end() : say.end() + size]
        if sum(map(points.count, _TAG_1)) > _MAX_RELATIVE:
            return True
    return False


def _openssl(name: str, *types: type) -> Callable[..., Any] | None:
    """OpenSSL's function for a context and arguments of these types; None: it was linked into the
    interpreter, where we cannot find it."""
    try:
        function = getattr(ctypes.CDLL(getattr(_ssl, "__file__", None)), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, *types)
    function.restype = ctypes.c_long
    return function  # type: ignore[no-any-return]


def _openssls(context: ssl.SSLContext) -> ctypes.c_void_p:
    """OpenSSL's context, which is what Python's has first."""
    return ctypes.c_void_p.from_address(id(context) + object.__basicsize__)


def _spoil_dear(
    sent: int, _version: int, kind: int, message: int, size: int, _ssl: object, _ours: object
) -> None:
    """Overwrite the certificates of the peer if they are dear: then no more is read."""
    if kind == _HANDSHAKE and not sent:
        text = ctypes.string_at(message, size)
        if text[0] == _CERTIFICATE and is_dear(text):
            # All but its kind and its size, by which OpenSSL found it.
            ctypes.memset(message + 4, 0xFF, size - 4)


_look_at: Any = None
# Some builds of libffi need memory for it that can be written and run, which the unit forbids.
with suppress(MemoryError):
    _look_at = ctypes.CFUNCTYPE(
        None,
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_void_p, ctypes.c_void_p),
    )(_spoil_dear)


class MeteredTls(ssl.SSLObject):
    """One end of a TLS connection that may take only so much of the loop's time for no data.

    The server chooses the certificates that we check. After the handshake it may send session
    tickets and key updates without end, and records in single bytes: a reader of the data sees none
    of that. So OpenSSL is given one record at a time.
    """

    cpu_s = staticmethod(time.thread_time)
    most_handshake_s = MAX_HANDSHAKE_CPU_S
    most_small_pieces: float = MAX_SMALL_PIECES
    _spent_s = 0.0
    _handshake_bytes = 0
    _idle_bytes = 0
    _idle_records = 0
    _small_pieces = 0
    _fed: ssl.MemoryBIO
    _incoming: ssl.MemoryBIO
    _ahead: bytes = b""
    # Whether OpenSSL may have data of the record that it was given last.
    _left = False

    @classmethod
    def _create(cls, fed: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> "MeteredTls":
        incoming = _shared.incoming
        made: MeteredTls = super()._create(incoming, *args, **kwargs)  # type: ignore[misc]
        made._fed, made._incoming = fed, incoming
        return made

    def feed(self, data: bytes) -> None:
        """Take bytes of the peer, without the memory that we were made with; b"": the end."""
        if data:
            self._ahead += data
            self._small_pieces += len(data) < SMALL_PIECE_BYTES
        else:
            self._fed = _ENDED

    @property
    def fed(self) -> bool:
        """Whether there are bytes of the peer, or data, that were not read."""
        return bool(self._left or self._ahead or self._fed.pending)

    def do_handshake(self) -> None:
        """Go on with it; raises ssl.SSLError, and BrokenResourceError if it has cost too much."""
        began = self.cpu_s()
        try:
            while True:
                try:
                    return super().do_handshake()
                except ssl.SSLWantReadError:
                    size = self._next_record()
                    self._handshake_bytes += size or TLS_PIECE_BYTES
                    # Before it is read: a long chain of certificates is read in one go.
                    if self._handshake_bytes > MAX_HANDSHAKE_BYTES:
                        raise trio.BrokenResourceError(
                            f"a handshake of more than {MAX_HANDSHAKE_BYTES} bytes, or in tiny"
                            " pieces"
                        ) from None
                    if not size:
                        self._refuse_end()
                        raise
        finally:
            self._drop_rest()
            self._spent_s += self.cpu_s() - began
            if self._spent_s > self.most_handshake_s:
                raise trio.BrokenResourceError(
                    f"the handshake took {self._spent_s * 1000:.0f} ms of CPU time,"
                    f" more than {self.most_handshake_s * 1000:.0f}"
                )

    def read(self, most: int = 1024) -> bytes:  # type: ignore[override]
        """Some data; raises ssl.SSLError, and BrokenResourceError after too much that is none."""
        try:
            while (data := self._read_record(most)) is None:
                pass
        finally:
            self._drop_rest()
        return data

    def _read_record(self, most: int) -> bytes | None:
        """Some data, or None after a record that has none; raises as `read`."""
        size = 0 if self._left else self._next_record()
        if self._small_pieces > self.most_small_pieces:
            raise trio.BrokenResourceError(
                f"more than {self.most_small_pieces} pieces of less than {SMALL_PIECE_BYTES} bytes"
            )
        try:
            data = super().read(most)
            self._left = len(data) == most
            return data
        except ssl.SSLWantReadError:
            if self._left:
                self._left = False  # We had read it to its end.
                return None
            self._idle_records += size > 0
            self._idle_bytes += size
            if self._idle_records > MAX_TLS_RECORDS or self._idle_bytes > MAX_TLS_BYTES:
                raise trio.BrokenResourceError(
                    f"more than {MAX_TLS_RECORDS} records or {MAX_TLS_BYTES} bytes of TLS"
                    " without data"
                ) from None
            if not size:
                self._refuse_end()
                raise
            # OpenSSL 3.0 keeps 16 KiB after such a record, until something is written.
            super().write(b"")
            return None

    def write(self, data: Any) -> int:
        """Encrypt it, and let the peer begin anew; raises ssl.SSLError."""
        self._idle_bytes = self._idle_records = self._small_pieces = 0
        return super().write(data)

    def _next_record(self) -> int:
        """Hand OpenSSL the next record, or what is none; its size, or 0 if none is whole."""
        if self._fed.pending:
            self.feed(self._fed.read())
        ahead = self._ahead
        size = 5 + (ahead[3] << 8 | ahead[4]) if len(ahead) >= 5 else _RECEIVE_BYTES
        if ahead and not (20 <= ahead[0] <= 24 and size <= _RECEIVE_BYTES):
            size = len(ahead)
        if len(ahead) < size:
            return 0
        self._incoming.write(ahead[:size])
        self._ahead = ahead[size:]
        return size

    def _drop_rest(self) -> None:
        """Leave no bytes of a peer whose stream broke to another one."""
        if self._incoming.pending:
            self._incoming.read()

    def _refuse_end(self) -> None:
        """Raise what OpenSSL raises, if the peer has ended without a goodbye."""
        if self._fed.eof:
            raise _unexpected_end() from None


def _unexpected_end() -> ssl.SSLEOFError:
    ended = ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "EOF occurred in violation of protocol")
    ended.reason = "UNEXPECTED_EOF_WHILE_READING"
    return ended


class ServedTls(MeteredTls):
    """The server's end. Our own key decides what a handshake costs, and a client may write little
    at a time."""

    most_handshake_s = most_small_pieces = math.inf


class _Shared(threading.local):
    """The memory from which OpenSSL reads, one for all streams of a thread: it never shrinks, and
    is empty between two records."""

    def __init__(self) -> None:
        self.incoming = ssl.MemoryBIO()


_shared: Final = _Shared()
_UNUSED: Final = ssl.MemoryBIO()
_ENDED: Final = ssl.MemoryBIO()
_ENDED.write_eof()


class Stream(trio.abc.Stream):
    """A stream that can be closed without a wait."""

    @abstractmethod
    def close(self) -> None:
        """Close without a goodbye; tasks that wait here get trio.ClosedResourceError."""


def close_now(stream: trio.abc.Stream) -> None:
    """Close a socket's stream, a `Stream`, or TLS over one of them, as `Stream.close` does."""
    if isinstance(stream, Stream):
        stream.close()
    elif isinstance(stream, trio.SocketStream):
        stream.socket.close()
    else:
        assert isinstance(stream, trio.SSLStream)
        close_now(stream.transport_stream)


async def receive_into(stream: trio.abc.Stream, take: Callable[[bytes], None]) -> None:
    """Call `take` with some data of the stream, as `TlsStream.receive_into` does."""
    if isinstance(stream, TlsStream):
        await stream.receive_into(take)
    else:
        take(bytes(await stream.receive_some()))


async def _now(step: Callable[..., T], *args: object) -> T:
    return step(*args)


class TlsStream(Stream):
    """A client's end of a TLS connection, for at most one task that sends and one that receives.

    A cancelled `receive_some` has lost nothing. A cancelled `send_all` leaves half a record behind:
    the stream is then broken. An end of the connection without the goodbye of TLS is an end, as
    most HTTP servers close so. Closing says no goodbye and waits for nothing.

    Attributes:
        socket: the connected socket, not blocking; it belongs to the stream.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        server_hostname: str,
        outgoing: ssl.MemoryBIO,
        turns: Turns,
        payer: Payer | None,
    ) -> None:
        """Raises ssl.SSLError or ValueError: the server name can be no server's.

        What the peer can make dear is done in turns, if there is a payer.
        `outgoing`: shared by all streams of a loop, because one keeps 11 KB and is used for a
        moment only. It is empty between the steps.
        """
        self.socket = sock
        self._outgoing = outgoing
        self._turns = turns
        self._payer = payer
        # What it is wrapped in is fed to it without the memory that `wrap_bio` asks for.
        made = context.wrap_bio(_UNUSED, self._outgoing, server_hostname=server_hostname)
        assert isinstance(made, MeteredTls)
        self._tls = made
        self._unsent = b""
        self._sending = self._receiving = False
        self._broken = self._ended = False
        self._heard = False

    async def do_handshake(self) -> None:
        """Shake hands; raises trio.BrokenResourceError, with the error of TLS as its cause."""
        # No turn for our hello: no peer can make it dear.
        step: Awaitable[None] = _now(self._shake_hands)
        while True:
            try:
                await step
            except ssl.SSLWantReadError:
                await self._flush()
                await trio.lowlevel.wait_readable(self.socket)
                self._take_in()
                step = self._in_turn(self._turns.handshake, self._shake_hands)
            except ssl.SSLError as error:
                with suppress(trio.BrokenResourceError):
                    self._send_now()  # The alert, which tells the peer the reason.
                raise self._break(error) from error
            else:
                return await self._flush()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it.

        Raises:
            trio.BrokenResourceError: the connection is broken, or an earlier call was cancelled.
            trio.ClosedResourceError: it is closed on this side.
            trio.BusyResourceError: another task is sending.
        """
        self._check_sending()
        await trio.lowlevel.checkpoint_if_cancelled()
        self._sending = True
        self._heard = False
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._step(self._tls.write, rest[:_RECORD_BYTES]) :]
                if len(self._unsent) >= _AT_ONCE_BYTES or not rest:
                    await self._flush()
        except ssl.SSLError as error:
            raise self._break(error) from error
        except BaseException:
            self._broken = True
            raise
        finally:
            self._sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Return once the kernel has room; raises as `send_all`."""
        self._check_sending()
        self._sending = True
        try:
            await trio.lowlevel.wait_writable(self.socket)
        finally:
            self._sending = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Some data, or b"" at the end.

        Raises:
            trio.BrokenResourceError: the connection is broken, or its TLS is.
            trio.ClosedResourceError: it is closed on this side.
            trio.BusyResourceError: another task is receiving.
        """
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError("max_bytes must be >= 1")
        most = _RECEIVE_BYTES if max_bytes is None else max_bytes
        return await self._receive(most, bytes)

    async def receive_into(self, take: Callable[[bytes], None]) -> None:
        """Call `take` with some data, or b"" at the end; raises as `receive_some`, and its errors.

        It is called in the same turn: what the peer sends may be dear to parse, too.
        """
        await self._receive(_RECEIVE_BYTES, take)

    async def _receive(self, most: int, take: Callable[[bytes], T]) -> T:
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving")
        self._check_open()

        def read() -> tuple[T] | None:
            data = self._read(most)
            return None if data is None else (take(data),)

        self._receiving = True
        try:
            here = self._ended or self._tls.fed
            while True:
                if here:
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(self.socket)
                    self._take_in()
                # An answer in many pieces is no usual one.
                usual = None if self._heard else self._turns.answer
                taken = await self._in_turn(usual, read)
                self._heard = True
                if taken is not None:
                    return taken[0]
                here = False
        finally:
            self._receiving = False

    async def deserted(self) -> bool:
        """Whether an idle connection has ended, is broken, or has data that no request asked for.

        Session tickets and key updates that have come are taken in. It may wait for turns, not for
        the peer; one that is used again meanwhile is left alone.
        """
        try:
            while (unasked := await self._in_turn(self._turns.answer, self._look)) is False:
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return True
        return unasked is not None

    def _look(self) -> bool | None:
        """Take in some of what has come; whether there is data in it, None: nothing has come."""
        if self._receiving or self._sending or not self._take_in():
            return None
        return self._read(1) is not None

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()

    async def aclose(self) -> None:
        """Close at once, without a goodbye; a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    def _in_turn(self, usual: Usual | None, step: Callable[..., T], *args: object) -> Awaitable[T]:
        if self._payer is None:
            return _now(step, *args)
        return self._turns.take(self._payer.accounts, usual, step, *args)

    def _shake_hands(self) -> None:
        self._step(self._tls.do_handshake)

    def _check_open(self) -> None:
        if self.socket.fileno() < 0:
            raise trio.ClosedResourceError("closed on this side")

    def _check_sending(self) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending")
        self._check_open()
        if self._broken:
            raise trio.BrokenResourceError("the connection broke before")

    def _break(self, error: OSError) -> trio.BrokenResourceError | trio.ClosedResourceError:
        """The error for the caller; nothing can be sent from here on.

        Data that the peer sent before can still be received: it may say the reason.
        """
        self._broken = True
        if self.socket.fileno() < 0:
            return trio.ClosedResourceError("closed on this side")
        return trio.BrokenResourceError(str(error))

    def _take_in(self) -> bool:
        """Move bytes from the socket to OpenSSL; False: there are none now."""
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise self._break(error) from error
        self._tls.feed(data)
        return True

    def _read(self, most: int) -> bytes | None:
        """Data from OpenSSL, b"" at the end, or None: it needs more bytes of the peer."""
        if self._ended:
            return b""
        try:
            return self._step(self._tls.read, most)
        except ssl.SSLWantReadError:
            return None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._ended = True
            return b""
        except ssl.SSLError as error:
            raise self._break(error) from error
        finally:
            if self._unsent:
                # The answer to a key update. That it cannot be sent shows to the task that sends.
                with suppress(trio.BrokenResourceError):
                    self._send_now()

    def _step(self, step: Callable[..., T], *args: object) -> T:
        """One step of OpenSSL; takes the bytes for the peer out of the shared memory."""
        if self._outgoing.pending:
            # Those of another peer, whose stream broke as we ran out of memory for them.
            self._outgoing.read()
        try:
            return step(*args)
        finally:
            if self._outgoing.pending:
                self._unsent += self._outgoing.read()

    async def _flush(self) -> None:
        while not self._send_now():
            await trio.lowlevel.wait_writable(self.socket)

    def _send_now(self) -> bool:
        """Give the kernel as many of OpenSSL's bytes as it takes; whether it took all."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise self._break(error) from error
        return True
