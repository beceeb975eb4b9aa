"""Starts of our programs by fork of a process that has imported them already.

A start is mostly imports, and the tests have hundreds of starts. `started_by_fork` has
`subprocess.Popen` ask that process, which runs this file, for them. What comes of it is a child of
ours like any other: it can be killed, frozen and waited for. A command whose interpreter would be
another one (other variables such as PYTHONHASHSEED), or that wants more than its three streams and
a directory, is started as ever; so is what a child starts itself.
"""

import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

COMMAND = (sys.executable, "-m")
OURS = ("fedsender", "tests.")
IMPORTED = (
    "fedsender.cli",
    "fedsender.daemon",
    "fedsender.embedded.endpoint",
    "fedsender_relay.process",
    "psycopg",
)
_OF_INTERPRETER = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_")
_MOST_BYTES = 200_000
_PR_SET_CHILD_SUBREAPER = 36


class Forks:
    """The process that is forked, which begins with the first start.

    Attributes:
        starts: how many there were.
    """

    def __init__(self) -> None:
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ours: socket.socket
        self._environ: dict[str, str] = {}

    def can(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a start with these arguments of `Popen._execute_child` is like ours."""
        command, env = arguments["args"], arguments["env"]
        unset = ("executable", "preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
        return (
            not isinstance(command, str | bytes | os.PathLike)
            and tuple(command[:2]) == COMMAND
            and command[2].startswith(OURS)
            and not any(arguments[name] for name in (*unset, "start_new_session"))
            and (env is None or _interpreters(env) == _interpreters(os.environ))
        )

    def start(self, arguments: Mapping[str, Any]) -> int:
        """The new process."""
        if self._process is None or _interpreters(os.environ) != self._environ:
            self._begin()
        streams = [
            given if given != -1 else own
            for given, own in (
                (arguments["p2cread"], 0),
                (arguments["c2pwrite"], 1),
                (arguments["errwrite"], 2),
            )
        ]
        mask = os.umask(0)
        os.umask(mask)
        asked = {
            "command": [os.fspath(each) for each in arguments["args"][2:]],
            "environ": dict(os.environ if arguments["env"] is None else arguments["env"]),
            "directory": os.fspath(arguments["cwd"] or Path.cwd()),
            "umask": mask,
        }
        self.starts += 1
        # Whose parent has ended is a child of the next process above that wants to be asked.
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._ours, [json.dumps(asked).encode()], streams)
            return int(self._ours.recv(20))
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _begin(self) -> None:
        self.end()
        self._environ = _interpreters(os.environ)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def end(self) -> None:
        if self._process is not None:
            self._ours.close()
            self._process.wait()
            self._process = None


def _interpreters(environ: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter looks at before it runs anything."""
    return {name: text for name, text in environ.items() if name.startswith(_OF_INTERPRETER)}


@contextmanager
def started_by_fork(forks: Forks) -> Iterator[None]:
    """Starts in the body are by fork, where they can be."""
    real: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    parameters = signature(real)

    def start(popen: Any, *args: Any, **named: Any) -> None:
        arguments = parameters.bind(popen, *args, **named).arguments
        if not forks.can(arguments):
            real(popen, *args, **named)
            return
        try:
            popen.pid = forks.start(arguments)
            popen._child_created = True
        finally:
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            popen._close_pipe_fds(*(arguments[name] for name in pipes))

    with mock.patch.object(subprocess.Popen, "_execute_child", start):
        yield


# --- the process that is forked ------------------------------------------------------------------


def main() -> None:
    """Fork for each request on the socket; in the child return, as if it had just begun."""
    asking = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for name in IMPORTED:
        import_module(name)
    # A search writes to all objects that it looks at, and so would copy their pages.
    gc.freeze()
    gc.enable()
    while True:
        request, streams, *_ = socket.recv_fds(asking, _MOST_BYTES, 3)
        if not request:
            os._exit(0)
        answer, answered = os.pipe()
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child == 0:
                break
            os.write(answered, str(child).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        asking.send(os.read(answer, 20))
        for each in (answer, answered, *streams):
            os.close(each)
    for number, each in enumerate(streams):
        os.dup2(each, number)
    asking.close()
    for each in (answer, answered, *streams):
        os.close(each)
    asked = json.loads(request)
    os.environ.clear()
    os.environ.update(asked["environ"])
    time.tzset()
    os.chdir(asked["directory"])
    os.umask(asked["umask"])
    sys.path.insert(0, asked["directory"])
    sys.argv[:] = asked["command"]


if __name__ == "__main__":
    # Ours are the installed modules and not those beside this file.
    sys.path.pop(0)
    main()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
