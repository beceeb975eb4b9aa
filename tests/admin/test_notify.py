"""Messages to an operator: what is told, when, how often, and by which way."""

import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from tests.admin.desk import Desk, Standing, open_desk, serve
from tests.federation.servers import (
    NAME,
    Authority,
    TableNetwork,
    client_of,
    one_server,
    read_request,
    response,
)
from tests.sender.harness import World, answer, ok
from trio.testing import MockClock

from fedsender.admin import notify
from fedsender.admin.context import AdminContext
from fedsender.admin.notify import Message, deliver
from fedsender.config import Config, ConfigError, from_values
from fedsender.runtime import real_runtime
from fedsender.telemetry import Metrics
from fedsender.testing.http import Request

A, B = "a.example", "b.example"
IP = "192.0.2.7"
ROOM = "!1:hs.example"
DAY_S = 86_400.0

Messages = list[tuple[str, str]]


@asynccontextmanager
async def watched(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    arrives: Callable[[], bool] = lambda: True,
    **settings: object,
) -> AsyncIterator[tuple[Desk, Messages]]:
    """A desk whose daemon is watched, and the messages that were tried, as (event, text)."""
    tried: Messages = []

    async def record(_: AdminContext, message: Message) -> bool:
        tried.append((message.event, message.text))
        return arrives()

    monkeypatch.setattr(notify, "deliver", record)
    world.settings["notify"] = {"command": ["/bin/true"], **settings}
    async with open_desk(world) as desk, trio.open_nursery() as nursery:
        nursery.start_soon(notify.notify, desk.context)
        await trio.sleep(60)
        yield desk, tried
        nursery.cancel_scope.cancel()


async def test_a_server_that_fails_for_long_is_told_of_once_and_when_it_is_back(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(world, monkeypatch) as (_, told):
        await world.join(ROOM, A, B)
        world.servers[A].down = True
        await world.say(ROOM, "to both")
        await trio.sleep(DAY_S - 600)
        assert told == []
        await trio.sleep(2 * DAY_S)
        [(event, text)] = told
        assert event == "failing"
        assert text == (
            f"1 server has not answered for 1 d or longer: {A}. `fedsender why SERVER` says more."
        )
        world.servers[A].down = False
        world.sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
        assert told[1:] == [("back", f"1 server answers again: {A}.")]


async def test_a_server_that_says_it_is_gone_is_told_of_like_any_that_fails(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(world, monkeypatch, failing_for="1h") as (_, told):
        await world.join(ROOM, A, B)
        world.servers[A].reply = lambda _: answer(410)
        await world.say(ROOM, "to both")
        await trio.sleep(3 * 3600)
        [(event, text)] = told
        assert event == "failing"
        assert f"1 server has not answered for 1 h or longer: {A}." in text
        world.servers[A].reply = ok
        world.sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
        assert told[1:] == [("back", f"1 server answers again: {A}.")]


async def test_a_server_that_was_purged_is_not_back(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(world, monkeypatch, failing_for="1h") as (desk, told):
        await world.join(ROOM, A)
        world.servers[A].down = True
        await world.say(ROOM, "unheard")
        await trio.sleep(DAY_S)
        await desk.post("purge", {"server": A, "force": True})
        await trio.sleep(60)
        assert [event for event, _ in told] == ["failing"]


async def test_a_paused_server_and_one_that_is_owed_nothing_are_not_told_of(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(world, monkeypatch, failing_for="1h") as (desk, told):
        await world.join(ROOM, A)
        world.servers[A].down = True
        await world.say(ROOM, "unheard")
        await trio.sleep(1800)
        await desk.post("pause", {"servers": [A], "reason": "moving"})
        await trio.sleep(7200)
        assert told == []
        await desk.post("resume", {"servers": [A]})
        await trio.sleep(60)
        assert [event for event, _ in told] == ["failing"]


async def test_not_ready_is_told_after_a_while_with_the_reasons_and_its_end(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(world, monkeypatch) as (desk, told):
        for _ in range(5):  # Each too short.
            desk.standing.open = False
            await trio.sleep(100)
            desk.standing.open = True
            await trio.sleep(15)
        assert told == []
        desk.standing.open = False
        await trio.sleep(300)
        [(event, text)] = told
        assert event == "not_ready"
        assert text.startswith("The sender of hs.example has not been ready for 2 min: ")
        assert "the instance lock is lost" in text
        desk.standing.open = True
        await trio.sleep(60)
        assert told[1:] == [("ready", "The sender of hs.example is ready again.")]


async def test_new_items_in_quarantine_are_told_of(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(world, monkeypatch) as (_, told):
        sender = world.sender
        for items in (2, 2, 1, 3):
            sender.quarantine_items = items
            await trio.sleep(20)
        assert told == [
            (
                "quarantine",
                "Quarantine has 2 items, 2 of them new. `fedsender quarantine` lists them.",
            ),
            (
                "quarantine",
                "Quarantine has 3 items, 2 of them new. `fedsender quarantine` lists them.",
            ),
        ]


async def test_messages_over_the_limit_become_one(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(world, monkeypatch, at_most=3) as (_, told):
        for items in range(1, 11):
            world.sender.quarantine_items = items
            await trio.sleep(20)
        assert len(told) == 3
        for _ in range(400):  # The sweep counts none meanwhile.
            world.sender.quarantine_items = 10
            await trio.sleep(9)
        assert [text for _, text in told[3:]] == [
            "Quarantine has 10 items, 7 of them new. `fedsender quarantine` lists them."
        ]


async def test_a_message_that_did_not_arrive_comes_again(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter((False, False, True))
    async with watched(world, monkeypatch, lambda: next(answers)) as (desk, told):
        desk.standing.open = False
        await trio.sleep(200)
        assert len(told) == 1
        await trio.sleep(900)
        assert [event for event, _ in told] == ["not_ready"] * 3


async def test_a_daemon_with_a_way_watches_itself(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def record(_: AdminContext, message: Message) -> bool:
        told.append(message.event)
        return True

    monkeypatch.setattr(notify, "deliver", record)
    for settings in ({}, {"command": ["/bin/true"]}):
        world.settings["notify"] = settings
        async with world.run(), serve(world, Standing(open=False)):
            await trio.sleep(300)
        assert told == ["not_ready"] * bool(settings)


# --- the ways -------------------------------------------------------------------------------------

SAMPLE = Message("quarantine", "Two items.", {"items": 2}, lambda: None)


def context_for(directory: Path, client: object = None, **settings: object) -> AdminContext:
    """As much of a daemon as a message needs."""
    values = {"server_name": "hs.example", "signing_key": "none", "notify": settings}
    config: Config = from_values(values, directory=directory)
    parts: dict[str, Any] = {
        "config": config,
        "runtime": replace(real_runtime(), now_ms=lambda: 1_000),
        "metrics": Metrics("hs.example"),
        "sender": SimpleNamespace(context=SimpleNamespace(client=client)),
    }
    return cast(AdminContext, SimpleNamespace(**parts))


def failures(context: AdminContext) -> float:
    return float(context.metrics.notify_failures.value)


def script(directory: Path, text: str) -> list[str]:
    path = directory / "tell.py"
    path.write_text(text)
    return [sys.executable, str(path)]


WHOLE = {
    "event": "quarantine",
    "text": "Two items.",
    "server_name": "hs.example",
    "instance": "fedsender",
    "at_ms": 1_000,
    "items": 2,
}


async def test_a_command_gets_the_message_on_its_standard_input(tmp_path: Path) -> None:
    out = tmp_path / "got"
    command = script(
        tmp_path, "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"
    )
    context = context_for(tmp_path, command=[*command, str(out)])
    assert await deliver(context, SAMPLE)
    assert json.loads(out.read_text()) == WHOLE
    assert failures(context) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit(3)", "ended with code 3"),
        ("import time; time.sleep(60)", "was ended: it took more than 0.5 s"),
        (None, "No such file or directory"),
    ],
)
async def test_a_command_that_fails_is_logged_and_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    said: str,
) -> None:
    if "sleep" in (text or ""):
        monkeypatch.setattr(notify, "COMMAND_S", 0.5)
    command = ["/nowhere/program"] if text is None else script(tmp_path, text)
    context = context_for(tmp_path, command=command)
    with trio.fail_after(20):
        assert not await deliver(context, SAMPLE)
    assert said in capsys.readouterr().out
    assert failures(context) == 1


async def test_a_command_that_is_ended_leaves_no_child(tmp_path: Path) -> None:
    """Neither of them hears SIGTERM, and a daemon that stops waits for none."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = ["/bin/sh", "-c", f"trap '' TERM; sleep 25 > {pipe} & wait"]
    context = context_for(tmp_path, command=command)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver, context, SAMPLE)
            # It opens when the child has opened it, too, and ends when no child has it open.
            end = await trio.to_thread.run_sync(pipe.open, "rb", abandon_on_cancel=True)
            nursery.cancel_scope.cancel()
        with end:
            assert await trio.to_thread.run_sync(end.read, abandon_on_cancel=True) == b""


async def test_a_url_gets_the_message_by_post(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its path and query; any status but 2xx is a failure."""
    requests: list[Request] = []

    async def hook(stream: trio.abc.Stream) -> None:
        if (request := await read_request(stream)) is not None:
            requests.append(request)
            await stream.send_all(response(204 if len(requests) == 1 else 302, b""))

    async with one_server(tmp_path, hook) as (_, server):
        network = TableNetwork(
            records={(NAME, "A"): [IP]}, ports={(IP, 8443): server.port, (IP, 443): server.port}
        )
        async with client_of(tmp_path, network) as client:
            context = context_for(tmp_path, client, url=f"https://{NAME}:8443/hook?key=1")
            assert await deliver(context, SAMPLE)
            context = context_for(tmp_path, client, url=f"https://{NAME}")
            assert not await deliver(context, SAMPLE)
    assert "answered with status 302" in capsys.readouterr().out
    assert [(each.method, each.target) for each in requests] == [
        ("POST", "/hook?key=1"),
        ("POST", "/"),
    ]
    assert dict(requests[0].headers)["host"] == f"{NAME}:8443"
    assert json.loads(requests[0].body) == WHOLE


async def test_a_forbidden_address_gets_no_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Authority(tmp_path)
    network = TableNetwork(records={(NAME, "A"): ["10.1.2.3"]})
    async with client_of(tmp_path, network, ip_deny=(ip_network("10.0.0.0/8"),)) as client:
        context = context_for(tmp_path, client, url=f"https://{NAME}/secret")
        assert not await deliver(context, SAMPLE)
    said = capsys.readouterr().out
    assert "10.1.2.3" in said
    assert "secret" not in said
    assert network.dialled == []
    assert failures(context) == 1


@pytest.mark.parametrize(
    "url",
    [
        *("http://b.example/", "https://u:p@b.example/", "https://b.example/ü", "https://:443/"),
        *("https://b.example:0/", "https://b.example:99999/", "https://b.example:1:2/"),
        *("https://[::1/", "https://[b]/", "https://127.1/"),
    ],
)
def test_a_url_must_be_https_and_plain(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"notify\.url"):
        context_for(tmp_path, url=url)


@pytest.mark.parametrize("command", [["true"], ["/bin/true", "a\0b"]])
def test_a_command_that_cannot_be_run_is_refused(tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"notify\.command"):
        context_for(tmp_path, command=command)
