"""The command line's side of the admin endpoint: one blocking request at a time."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from fedsender.config import Address, Config, TcpAddress, read_secret

PREFIX = "/_fedsender/admin/v1"
# Longer than the endpoint takes before it gives up.
_TIMEOUT_S = 90.0
_MAX_ANSWER_BYTES = 64 * 2**20


class AdminError(Exception):
    """The endpoint refused, or could not be asked; the text is for the operator.

    Attributes:
        status: of the answer; 0: there was none.
        answer: its JSON object; empty if there was none.
    """

    def __init__(self, text: str, status: int = 0, answer: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.answer = answer or {}


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class AdminClient:
    """Asks the daemon of one configuration. Every request has a connection of its own.

    Args:
        timeout: seconds that the daemon may take for one answer.
    """

    def __init__(self, address: Address, token: str | None, timeout: float = _TIMEOUT_S) -> None:
        self._address = address
        self._token = token
        self._timeout = timeout

    @classmethod
    def of(cls, config: Config, timeout: float = _TIMEOUT_S) -> "AdminClient":
        """The client for this configuration's daemon; raises ConfigError for the token's file."""
        token_file = config.admin.token_file
        token = None if token_file is None else read_secret(token_file)
        return cls(config.admin.listen, token, timeout)

    def get(self, *path: str, **query: object) -> dict[str, Any]:
        """Ask for a path below our prefix, its parts as they are; raises AdminError."""
        asked = {name.rstrip("_"): value for name, value in query.items() if value is not None}
        suffix = f"?{urlencode(asked)}" if asked else ""
        return self._ask("GET", self._path(path) + suffix, None)

    def post(self, *path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Tell a path below our prefix; raises AdminError."""
        return self._ask("POST", self._path(path), json.dumps(body).encode())

    def problems(self) -> list[str]:
        """Why the daemon is not ready, in its own words; none: it is. Raises AdminError."""
        try:
            self._ask("GET", "/ready", None)
        except AdminError as error:
            if error.status != 503 or not isinstance(error.answer.get("reasons"), list):
                raise
            return [str(reason) for reason in error.answer["reasons"]]
        return []

    def pages(self, path: str, **query: object) -> Iterator[dict[str, Any]]:
        """All pages of a list, each asked for when it is wanted; raises AdminError."""
        start: object = None
        while True:
            page = self.get(path, from_=start, **query)
            yield page
            start = page["next_from"]
            if start is None:
                return

    def _path(self, parts: tuple[str, ...]) -> str:
        return "/".join((PREFIX, *(quote(part, safe="") for part in parts)))

    def _connection(self) -> http.client.HTTPConnection:
        if isinstance(self._address, TcpAddress):
            return http.client.HTTPConnection(
                self._address.host, self._address.port, timeout=self._timeout
            )
        return _UnixConnection(str(self._address.path), self._timeout)

    def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers: dict[str, str | bytes] = {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}".encode()
        connection = self._connection()
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            text = response.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or error
            said = f"no answer from the daemon at {self._address}: {why}; {_next_step(error)}"
            raise AdminError(said) from error
        finally:
            connection.close()
        return self._checked(response.status, text)

    def _checked(self, status: int, text: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise AdminError(
                f"{self._address} answered {status}, but not as fedsender does", status
            )
        if status != 200:
            raise AdminError(f"{answer.get('error', 'refused')} ({status})", status, answer)
        return answer


def _next_step(error: Exception) -> str:
    """The advice for a request without an answer."""
    if isinstance(error, PermissionError):
        return "only the daemon's user and root may ask it: run the command as one of them"
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "start it; if it runs, it was started with another admin.listen"
    return "if it runs, its log says why"
