"""`notify:` tells an operator that something is wrong, and that it is well again.

A message is one JSON object. A command gets it on its standard input, and a URL by POST. Each look
compares what is so now with what was told. So a failed message comes again, messages over the limit
become one, and a restarted daemon tells again what is still wrong.
"""

import json
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog
import trio

from fedsender.admin.context import AdminContext
from fedsender.admin.display import duration, listed, many
from fedsender.admin.probes import problems
from fedsender.federation.client import Unreachable
from fedsender.federation.transport import ExchangeFailed, reason
from fedsender.runtime import OutOfResources

log = structlog.get_logger()

LOOK_S: Final = 10.0
RETRY_S: Final = 300.0
"""Seconds without a message after a failed one."""
COMMAND_S: Final = 30.0
POST_S: Final = 10.0
HOUR_S: Final = 3600.0
NAMED: Final = 20
"""So many servers are named in a message; it has the number of all."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        event: not_ready, ready, quarantine, failing or back.
        text: one or two sentences for people.
        facts: the same as JSON values.
        note: is called when the message was delivered.
    """

    event: str
    text: str
    facts: dict[str, object]
    note: Callable[[], object] = field(compare=False)


class Watch:
    """Compares the daemon with what was told of it."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context
        self._settings = context.config.notify
        self._reasons: list[str] = []
        self._unready_since: float | None = None
        self._told_unready = False
        self._told_items = 0
        self._told_failing: set[str] = set()

    def look(self) -> None:
        """Note how the daemon stands now."""
        self._reasons = list(problems(self._context))
        if not self._reasons:
            self._unready_since = None
        elif self._unready_since is None:
            self._unready_since = trio.current_time()
        self._told_items = min(self._told_items, self._context.sender.quarantine_items)
        states = map(self._context.sender.registry.state_of, self._told_failing)
        # A server that was purged has no success.
        self._told_failing = {
            state.destination
            for state in states
            if not state.healthy or state.last_success_ms is not None
        }

    def due(self) -> Message | None:
        """What should be told first, as of the last look; None: nothing."""
        return self._readiness() or self._quarantine() or self._failing() or self._back()

    def _readiness(self) -> Message | None:
        name = self._context.config.server_name
        if self._unready_since is None:
            if not self._told_unready:
                return None
            note = partial(setattr, self, "_told_unready", False)
            return Message("ready", f"The sender of {name} is ready again.", {}, note)
        for_s = trio.current_time() - self._unready_since
        if self._told_unready or for_s < self._settings.not_ready_for:
            return None
        why = "; ".join(self._reasons)
        text = f"The sender of {name} has not been ready for {duration(for_s)}: {why}."
        note = partial(setattr, self, "_told_unready", True)
        return Message("not_ready", text, {"reasons": self._reasons}, note)

    def _quarantine(self) -> Message | None:
        items = self._context.sender.quarantine_items
        if items <= self._told_items:
            return None
        text = (
            f"Quarantine has {many(items, 'item')}, {items - self._told_items:,} of them new."
            " `fedsender quarantine` lists them."
        )
        facts: dict[str, object] = {"items": items, "new": items - self._told_items}
        return Message("quarantine", text, facts, partial(setattr, self, "_told_items", items))

    def _failing(self) -> Message | None:
        registry = self._context.sender.registry
        before_ms = self._context.runtime.now_ms() - self._settings.failing_for * 1000
        found = sorted(
            (state.failing_since_ms, name)
            for name in registry.failing()
            if name not in self._told_failing
            and (state := registry.state_of(name)).failing_since_ms is not None
            and state.failing_since_ms <= before_ms
            and registry.owes(name)
        )
        if not found:
            return None
        servers = [
            {
                "server": name,
                "failing_since_ms": since_ms,
                "outcome": registry.state_of(name).outcome,
                "reason": registry.state_of(name).reason,
            }
            for since_ms, name in found[:NAMED]
        ]
        verb = "has" if len(found) == 1 else "have"
        text = (
            f"{many(len(found), 'server')} {verb} not answered for"
            f" {duration(self._settings.failing_for)} or longer:"
            f" {listed([name for _, name in found], NAMED)}. `fedsender why SERVER` says more."
        )
        note = partial(self._told_failing.update, [name for _, name in found])
        return Message("failing", text, {"number": len(found), "servers": servers}, note)

    def _back(self) -> Message | None:
        registry = self._context.sender.registry
        names = sorted(name for name in self._told_failing if registry.state_of(name).healthy)
        if not names:
            return None
        verb = "answers" if len(names) == 1 else "answer"
        text = f"{many(len(names), 'server')} {verb} again: {listed(names, NAMED)}."
        note = partial(self._told_failing.difference_update, names)
        return Message("back", text, {"number": len(names), "servers": names[:NAMED]}, note)


async def notify(context: AdminContext) -> None:
    """Look every `LOOK_S` seconds, for ever, and tell what is due."""
    watch, settings = Watch(context), context.config.notify
    sent: deque[float] = deque(maxlen=settings.at_most)
    silent_until = 0.0
    while True:
        await trio.sleep(LOOK_S)
        watch.look()
        now = trio.current_time()
        if now < silent_until or (message := watch.due()) is None:
            continue
        sent.append(now)
        if await deliver(context, message):
            message.note()
            silent_until = 0.0
        else:
            silent_until = now + RETRY_S
        if len(sent) == settings.at_most:
            silent_until = max(silent_until, sent[0] + HOUR_S)


async def deliver(context: AdminContext, message: Message) -> bool:
    """Give a message to the command and to the URL; True: one of them took it.

    A failure is logged and counted.
    """
    config = context.config
    whole = {
        "event": message.event,
        "text": message.text,
        "server_name": config.server_name,
        "instance": config.instance_name,
        "at_ms": context.runtime.now_ms(),
        **message.facts,
    }
    body = json.dumps(whole).encode()
    taken = False
    for setting, value, way in (
        ("notify.command", config.notify.command, partial(_run, config.notify.command, body)),
        ("notify.url", config.notify.url, partial(_post, context, body)),
    ):
        if not value:
            continue
        if (error := await way()) is None:
            taken = True
        else:
            context.metrics.notify_failures.inc()
            log.error("message not delivered", by=setting, error=error, text=message.text)
    return taken


async def _run(command: tuple[str, ...], body: bytes) -> str | None:
    """Run the command; return its failure in words. Its standard error goes to the daemon's log."""
    try:
        with trio.fail_after(COMMAND_S):
            done = await trio.run_process(
                command,
                stdin=body,
                check=False,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                deliver_cancel=_kill,
            )
    except trio.TooSlowError:
        return f"{command[0]} was ended: it took more than {COMMAND_S:g} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror or reason(error)}"
    return f"{command[0]} ended with code {done.returncode}" if done.returncode else None


async def _kill(process: trio.Process) -> None:
    """End a command with its children, which would outlive it, and which may ignore SIGTERM."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _post(context: AdminContext, body: bytes) -> str | None:
    """POST to the URL, which may be a secret; return the failure in words, without it."""
    url = context.config.notify.url
    assert url is not None
    try:
        with trio.fail_after(POST_S):
            status = await context.sender.context.client.post(url, body)
    except trio.TooSlowError:
        return f"no answer in {POST_S:g} s"
    except (Unreachable, ExchangeFailed) as failure:
        return failure.text
    except (OutOfResources, ValueError) as error:
        return reason(error)
    return None if 200 <= status < 300 else f"answered with status {status}"
