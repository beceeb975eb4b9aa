"""Several senders on one database, asked as one at the admin endpoint of any of them."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from sqlalchemy import func, literal, select
from structlog.testing import capture_logs
from tests.admin.desk import OURS, checked
from tests.pipeline.test_repair import lake_that_misses
from tests.servers import Databases
from tests.switching.test_senders import (
    BAD,
    HS,
    ROOM,
    Site,
    all_have,
    fan_out,
    nothing_came_twice,
    one_more_event,
    site,
    write_history,
)

from fedsender.admin import open_admin
from fedsender.admin.app import build_app
from fedsender.admin.bodies import Pause
from fedsender.admin.context import AdminContext
from fedsender.admin.endpoints import Held, pause_ours
from fedsender.admin.overview import overview_here
from fedsender.admin.together import AWAY_S, LOOK_EVERY_S, answer_others
from fedsender.daemon import admin_context
from fedsender.matrix import shard_of
from fedsender.runtime import real_runtime
from fedsender.store import StoreError, backup, requests, store_config, tables
from fedsender.store.leases import LeaseLost
from fedsender_lab.testing.clock import until
from fedsender_pipeline.repair import Repaired, repair


@dataclass
class Desks:
    """The endpoints of the senders that run, by name."""

    site: Site
    nursery: trio.Nursery
    answering: dict[str, trio.CancelScope] = field(default_factory=dict)
    http: dict[str, httpx.AsyncClient] = field(default_factory=dict)

    def open(self, *names: str) -> None:
        """As `open_admin` does, without sockets."""
        for name in names:
            context = admin_context(self.site.sending[name], real_runtime())
            app: Any = build_app(context)
            transport = httpx.ASGITransport(app=app)
            self.http[name] = httpx.AsyncClient(
                transport=transport, base_url=f"http://{name}{OURS}", timeout=60
            )
            self.answering[name] = trio.CancelScope()
            self.nursery.start_soon(self._answer, context, self.answering[name])

    async def _answer(self, context: Any, scope: trio.CancelScope) -> None:
        with scope:
            await answer_others(context)

    def close(self, *names: str) -> None:
        for name in names:
            self.answering[name].cancel()

    async def get(self, name: str, path: str, status: int = 200, **query: Any) -> Any:
        return checked(await self.http[name].get(f"/{path}", params=query), status)

    async def post(self, name: str, path: str, body: object, status: int = 200) -> Any:
        return checked(await self.http[name].post(f"/{path}", json=body), status)

    def of(self, name: str) -> list[str]:
        """The servers of this sender."""
        handles = self.site.sending[name].config.handles
        return sorted(each for each in self.site.receivers.servers if handles(each))


@asynccontextmanager
async def desks(directory: Path, postgres: Databases) -> AsyncIterator[Desks]:
    """Two senders, and the desk of each."""
    async with site(directory, postgres) as it, trio.open_nursery() as nursery:
        it.become(well=False)
        await it.start("a", "b")
        found = Desks(it, nursery)
        found.open("a", "b")
        yield found
        nursery.cancel_scope.cancel()


def times(it: Site, server: str, event_id: str) -> int:
    """How often this server got the event."""
    sent = it.receivers.servers[server].transactions
    return sum(event_id in (pdu.event_id for pdu in each.pdus) for each in sent)


async def no_order_waits(it: Site, name: str) -> None:
    """Wait until this sender has done what it was asked."""
    requests = it.sending[name].store.sender.requests
    with trio.fail_after(60):
        while await requests.ours(()):  # noqa: ASYNC110
            await trio.sleep(0.05)


async def rows_left(it: Site) -> int:
    count: int = await it.in_own(
        lambda connection: connection.scalar(select(func.count()).select_from(tables.requests))
    )
    return count


async def test_any_sender_is_told_for_all_of_them(tmp_path: Path, postgres: Databases) -> None:
    async with desks(tmp_path, postgres) as both:
        of_a, of_b = both.of("a"), both.of("b")
        one, other = of_b[:2]
        registry = both.site.sending["b"].sender.registry
        said = await both.post("a", "pause", {"servers": [one, of_a[0]], "reason": "by me"})
        assert sorted(said["servers"]) == sorted([one, of_a[0]])
        assert registry.state_of(one).paused == "by me"
        why = await both.get("a", f"why/{one}")
        assert (why["state"], why["paused"], why["handled_here"]) == ("paused", "by me", True)
        assert (await both.post("a", "resume", {"servers": [one]})) == {"servers": [one]}
        await both.post("b", "resume", {"servers": of_a[:1]})
        assert registry.state_of(one).paused is None

        await until(lambda: registry.state_of(other).failures > 0)
        said = await both.post("a", "notify_remote_server_up", {"pattern": "*"})
        assert sorted(said["woken"]) == sorted(both.site.receivers.servers)
        said = await both.post("a", "notify_remote_server_up", {"servers": ["no.example", other]})
        assert said["woken"] == [other]
        assert said["left_alone"] == {"no.example": "not a server that we know of"}
        said = await both.post("a", "purge", {"server": "no.example"}, 404)
        assert said["error"] == "no.example: not a server that we know of"
        assert await both.post("a", "purge", {"server": other}) == {"purged": other}
        assert registry.status(other) is None
        await both.get("a", f"why/{other}", 404)
        assert await rows_left(both.site) == 0


async def test_an_order_is_carried_out_at_the_owners_next_look(
    tmp_path: Path, postgres: Databases
) -> None:
    """There are four in a second; however slow this machine is, it takes no second one."""
    assert LOOK_EVERY_S * 4 <= AWAY_S
    async with desks(tmp_path, postgres) as both:
        asks, looks = (both.site.sending[name].store.sender.requests for name in ("a", "b"))
        count, found_at, asked_at = 0, [0], [0]
        ask, look = asks.ask, looks.ours

        async def asked(*row: Any, **more: Any) -> Any:
            rows = await ask(*row, **more)
            asked_at.append(count)
            return rows

        async def looked(under_way: Any) -> Any:
            nonlocal count
            count += 1
            this = count
            found = await look(under_way)
            found_at.extend(this for each in found if each.is_order)
            return found

        asks.ask, looks.ours = asked, looked  # type: ignore[method-assign]
        registry = both.site.sending["b"].sender.registry
        one = both.of("b")[0]
        await until(lambda: registry.state_of(one).failures > 0)
        for verb, more, shown in (
            ("pause", {"reason": "by me"}, ("paused", "by me")),
            ("resume", {}, ("paused", None)),
            ("park", {"reason": "gone"}, ("parked", "gone")),
            ("resume", {}, ("parked", None)),
            ("notify_remote_server_up", {}, ("parked", None)),
        ):
            await both.post("a", verb, {"servers": [one], **more})
            name, value = shown
            assert getattr(registry.state_of(one), name) == value
            assert found_at[-1] <= asked_at[-1] + 1
        assert len(found_at) == len(asked_at)


async def test_an_order_outlasts_the_lease_of_whoever_had_begun_with_it(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desks(tmp_path, postgres) as both:
        here, tries = pause_ours.here, [LeaseLost("the lease has ended")]

        async def ends(context: AdminContext, request: Pause) -> Held:
            if tries:
                raise tries.pop()
            return await here(context, request)

        monkeypatch.setattr(pause_ours, "here", ends)
        of_b = both.of("b")[:1]
        with capture_logs() as logged:
            assert await both.post("a", "pause", {"servers": of_b}) == {"servers": of_b}
        assert not [each for each in logged if each["event"] == "request_failed"]


async def test_a_sender_of_an_older_version_says_what_it_does_not_know(
    tmp_path: Path, postgres: Databases
) -> None:
    async with desks(tmp_path, postgres) as both:
        asked = both.site.sending["a"].store.sender.requests
        rows = await asked.ask(["b"], "dance", "{}", is_order=True)
        assert rows is not None
        said = None
        while said is None:
            await trio.sleep(LOOK_EVERY_S)
            [reply] = (await asked.replies(rows)).values()
            said = reply.answer
        status, _, text = json.loads(said)["refused"]
        assert (status, text) == (501, "it does not know dance: its version is older")


async def test_clocks_of_machines_need_not_agree(tmp_path: Path, postgres: Databases) -> None:
    async with desks(tmp_path, postgres) as both:
        ahead = both.site.sending["b"].store.sender.requests
        now_ms = ahead._now_ms
        ahead._now_ms = lambda: now_ms() + 3_600_000
        of_b = both.of("b")
        await until(lambda: len(both.site.sending["b"].sender.registry.failing()) == len(of_b))
        said = await both.post("a", "pause", {"servers": of_b})
        assert sorted(said["servers"]) == of_b


async def test_any_sender_shows_all_of_them(tmp_path: Path, postgres: Databases) -> None:
    async with desks(tmp_path, postgres) as both:
        names = sorted(both.site.receivers.servers)
        failing = [both.site.sending[name].sender.registry.failing for name in ("a", "b")]
        await until(lambda: sum(len(each()) for each in failing) == len(names))
        for name in ("a", "b"):
            shown = await both.get(name, "overview", behind="true", sort="owed", limit=3)
            assert set(shown["senders"]) == {"a", "b"}
            assert shown["states"]["failing"] == shown["page"]["known"] == len(names)
            assert shown["owed"]["servers"] == shown["page"]["behind"] == len(names)
            # Nobody is there to say what is new.
            assert {each[:2] for each in shown["reasons"]} == {"a:", "b:"}
            for sort in ("name", "owed", "fails"):
                listed: list[str] = []
                start = None
                while start is not None or not listed:
                    query: dict[str, Any] = {} if start is None else {"from": start}
                    page = await both.get(name, "destinations", sort=sort, limit=5, **query)
                    listed += [each["destination"] for each in page["destinations"]]
                    start = page["next_from"]
                assert len(listed) == len(names)
                assert sorted(listed) == names
            groups = await both.get(name, "groups", by="site")
            assert sum(each["failing"] for each in groups["groups"]) == len(names)
        # Dead servers are counted by who sends to them alone.
        counts = [len(each()) for each in failing]
        assert counts == [len(both.of("a")), len(both.of("b"))]


async def history_sent(it: Site) -> str:
    """The id of the last of some events, which all servers have."""
    good, upto = await write_history(it, bad_one=False)
    it.become(well=True)
    await fan_out(it, upto, "a", "b")
    await until(all_have(it, good))
    return good


async def test_a_trace_and_attempts_go_through_all_ledgers(
    tmp_path: Path, postgres: Databases
) -> None:
    """Also those of a sender that had a server before the list changed."""
    async with desks(tmp_path, postgres) as both:
        it = both.site
        good = await history_sent(it)
        was = both.of("a")
        both.close("a", "b")
        await it.change("b", "a")
        both.open("a", "b")
        moved = sorted(set(was) - set(both.of("a")))
        assert moved
        for name in ("a", "b"):
            traced = await both.get(name, f"trace/{good}")
            fates = {each["destination"]: each["outcome"] for each in traced["destinations"]}
            assert fates == dict.fromkeys(it.receivers.servers, "delivered")
            assert traced["fanned_out"]
            attempts = await both.get(name, f"attempts/{moved[0]}")
            assert set(attempts["ledgers"]) == {"a"}
            assert attempts["attempts"][-1]["outcome"] == "delivered"


async def test_an_event_that_no_server_got_is_one_entry(
    tmp_path: Path, postgres: Databases
) -> None:
    async with desks(tmp_path, postgres) as both:
        it = both.site
        good, upto = await write_history(it)
        it.become(well=True)
        await fan_out(it, upto, "a", "b")
        for name in ("a", "b"):
            items = (await both.get(name, "quarantine"))["items"]
            assert [each["event_id"] for each in items] == [BAD, good]
        stores = [sender.store.sender for sender in it.sending.values()]
        assert sum([await each.quarantine_size() for each in stores]) == 2
        bad, waits = [each["id"] for each in items]
        said = await both.post("b", "quarantine/release", {"ids": [bad]})
        assert (said["released"], said["kept"], len(said["refused"])) == ([], [bad], 1)
        assert await both.post("b", "quarantine/drop", {"ids": [bad]}) == {
            "dropped": [bad],
            "more": False,
        }
        said = await both.post("b", "quarantine/release", {"ids": [waits]})
        assert (said["released"], said["kept"]) == ([waits], [])
        await until(all_have(it, good))
        for sender in it.sending.values():
            assert not sender.sender.fan_out.blocked
        assert (await both.get("a", "quarantine"))["items"] == []
        await both.post("a", "quarantine/release", {"ids": [waits]}, 404)


async def in_quarantine(both: Desks, name: str) -> list[int]:
    """The ids of all items, as this sender tells them."""
    return [each["id"] for each in (await both.get(name, "quarantine"))["items"]]


async def refused_behind(both: Desks, name: str, ids: list[int], why: str) -> None:
    """Nothing of this is released or given up, as this sender says."""
    for path in ("quarantine/drop", "quarantine/release"):
        for what in ({"ids": ids}, {"room_id": ROOM}):
            said = await both.post(name, path, what, 409)
            assert said["errcode"] == "FEDSENDER_BEHIND"
            assert said["error"].startswith(why), said


async def drop_and_release(both: Desks, name: str) -> None:
    """Give the first item up, and release the one behind it."""
    bad, waits = await in_quarantine(both, name)
    await both.post(name, "quarantine/drop", {"ids": [bad]})
    said = await both.post(name, "quarantine/release", {"ids": [waits]})
    assert (said["released"], said["kept"]) == ([waits], [])


async def test_what_a_sender_has_yet_to_come_to_is_not_released_before(
    tmp_path: Path, postgres: Databases
) -> None:
    """b would hold it back again; and all that a had sent in that room since would come twice with
    the next release."""
    async with desks(tmp_path, postgres) as both:
        it = both.site
        it.become(well=True)
        await until(it.all_have(200))
        good, upto = await write_history(it)
        await fan_out(it, upto, "a")
        await refused_behind(both, "a", await in_quarantine(both, "a"), "b has yet to come to it")
        await fan_out(it, upto, "b")
        await drop_and_release(both, "a")
        await until(all_have(it, good))
        assert await in_quarantine(both, "a") == []
        nothing_came_twice(it)


async def test_what_a_sender_may_walk_again_is_not_released_before(
    tmp_path: Path, postgres: Databases
) -> None:
    """a walks for b's servers, and would hold it back again at a start before its position is past
    the walk; with the next release a's own servers would get it twice."""
    async with desks(tmp_path, postgres) as both:
        it = both.site
        it.become(well=True)
        await until(it.all_have(200))
        good, upto = await write_history(it)
        await fan_out(it, upto, "a")
        both.close("a", "b")
        await it.change("a")
        both.open("a")
        await refused_behind(both, "a", await in_quarantine(both, "a"), "a has yet to come to it")
        await one_more_event(it, upto + 1)
        await fan_out(it, upto + 1, "a")
        await drop_and_release(both, "a")
        await until(all_have(it, good))
        both.close("a")
        await it.stop("a")
        await it.start("a")
        both.open("a")
        assert await in_quarantine(both, "a") == []
        nothing_came_twice(it)


async def test_what_an_absent_sender_would_have_to_release_is_not_released_without_it(
    tmp_path: Path, postgres: Databases
) -> None:
    """The order would go to whoever has b's servers next, with a's servers: they got it."""
    async with desks(tmp_path, postgres) as both:
        it = both.site
        it.become(well=True)
        good, upto = await write_history(it)
        await fan_out(it, upto, "a", "b")
        both.close("b")
        await refused_behind(both, "a", await in_quarantine(both, "a"), "its sender is away (b)")
        both.close("a")
        await it.change("a")
        both.open("a")
        await fan_out(it, upto, "a")
        await drop_and_release(both, "a")
        await until(all_have(it, good))
        assert await in_quarantine(both, "a") == []
        nothing_came_twice(it)


async def test_an_audit_repairs_at_each_of_the_senders(tmp_path: Path, postgres: Databases) -> None:
    """It asks one of them; what an absent one will do later is said to be missing still."""
    async with desks(tmp_path, postgres) as both:
        it = both.site
        good = await history_sent(it)
        one, other = both.of("a")[0], both.of("b")[0]
        (tmp_path / "token").write_text("secret")
        asked = it.sending["a"]
        lake = lake_that_misses(tmp_path, (one, good), (other, good), (other, "$gone"))

        async def repaired() -> Repaired:
            return await trio.to_thread.run_sync(repair, lake, asked.config)

        async with open_admin(admin_context(asked, real_runtime())):
            told = await repaired()
            assert (told.accepted, told.without) == (2, {})
            assert [each["destination"] for each in told.refused] == [other]
            await until(lambda: times(it, one, good) == times(it, other, good) == 2)
            both.close("b")
            await it.stop("b")
            told = await repaired()
            assert (told.accepted, told.without) == (1, {"b": "queued: its sender is away (b)"})


async def who_is_next(both: Desks, left: str) -> str:
    """b, which is away, comes back, or a gets its servers: the name of who has them, and a desk."""
    both.close("a")
    name = "b" if left == "it comes back" else "a"
    if name == "b":
        await both.site.start(name)
    else:
        await both.site.change(name)
    both.open(name)
    return name


@pytest.mark.parametrize("left", ["it comes back", "its servers get another sender"])
async def test_an_order_waits_for_a_sender_that_is_away(
    left: str, tmp_path: Path, postgres: Databases
) -> None:
    async with desks(tmp_path, postgres) as both:
        it = both.site
        of_b = both.of("b")
        failing = it.sending["b"].sender.registry.failing
        await until(lambda: set(failing()) == set(of_b))
        both.close("b")
        await it.stop("b")
        said = await both.post("a", "pause", {"servers": of_b[:1], "for_ms": 600_000}, 503)
        queued_ms = real_runtime().now_ms()
        assert said["errcode"] == "FEDSENDER_AWAY"
        assert said["error"] == "queued: its sender is away (b)"
        said = await both.post("a", "pause", {"servers": [*both.of("a"), *of_b[1:]]})
        assert set(said["servers"]) == set(both.of("a"))
        assert said["without"] == {"b": "queued: its sender is away (b)"}
        said = await both.post("a", "resume", {"servers": of_b[1:2]}, 503)
        shown = await both.get("a", f"why/{of_b[0]}")
        away = "The federation sender b handles it, which is away. By the database: Failing for"
        assert shown["summary"].startswith(away), shown["summary"]
        shown = await both.get("a", "overview")
        assert "b: its sender is away (b)" in shown["reasons"]
        state_of = it.sending[await who_is_next(both, left)].sender.registry.state_of
        # In the order in which they were given.
        paused = {*of_b[:1], *of_b[2:]}
        await until(lambda: {name for name in of_b if state_of(name).paused} == paused)
        # Two seconds have passed since it was said.
        ends_ms = state_of(of_b[0]).paused_until_ms
        assert ends_ms is not None
        assert ends_ms - 600_000 >= queued_ms - 1_000


@pytest.mark.parametrize("left", ["it comes back", "its servers get another sender"])
async def test_an_order_does_not_overtake_one_that_waits(
    left: str, tmp_path: Path, postgres: Databases
) -> None:
    async with desks(tmp_path, postgres) as both:
        it = both.site
        of_b = both.of("b")
        both.close("b")
        await it.stop("b")
        await both.post("a", "pause", {"servers": of_b}, 503)
        name = await who_is_next(both, left)
        both.close(name)  # Before it has looked for orders.
        state_of = it.sending[name].sender.registry.state_of
        async with trio.open_nursery() as nursery:
            nursery.start_soon(both.post, name, "resume", {"servers": of_b})
            await trio.sleep(2 * LOOK_EVERY_S)
            both.open(name)
        assert not any(state_of(server).paused for server in of_b)
        assert await it.sending[name].store.sender.requests.last_order(None) is None


async def test_what_is_handed_on_is_for_the_servers_of_the_sender_that_was_away(
    tmp_path: Path, postgres: Databases
) -> None:
    """The others have done their part of it, and it may have been undone since."""
    async with desks(tmp_path, postgres) as both:
        it = both.site
        good = await history_sent(it)
        of_a, of_b = both.of("a"), both.of("b")
        await it.start("c", "d", "e", configured=["a", "b"])
        both.close("b")
        await it.stop("b")
        by_name = {"servers": [of_a[0], *of_b], "reason": "by name"}
        pairs = [[server, good] for server in by_name["servers"]]
        away = {"b": "queued: its sender is away (b)"}
        for verb, body in {
            "pause": by_name,
            "park": {"pattern": "*"},
            "redeliver": {"pairs": pairs},
        }.items():
            assert (await both.post("a", verb, body))["without"] == away
        assert (await both.post("a", "resume", {"servers": of_a})) == {"servers": of_a}
        await until(lambda: times(it, of_a[0], good) == 2)

        # Some of b's servers are a's then, and some are not.
        wanted = ["c", "d"]
        if len({shard_of(server, 3) for server in of_b}) == 1:
            wanted.append("e")
        shards = Counter(shard_of(server, len(wanted) + 1) for server in of_b)
        wanted.insert(shards.most_common(1)[0][0], "a")
        both.close("a")
        await it.change(*wanted)
        both.open("a")
        gained = sorted(set(both.of("a")) & set(of_b))
        later = sorted(set(of_b) - set(gained))
        assert gained
        assert later
        await no_order_waits(it, "a")
        assert held_back(it, "a") == set(gained)
        await both.post("a", "resume", {"servers": gained})

        # c and d have done nothing of it.
        both.close("a")
        await it.change("a")
        (tmp_path / "token").write_text("secret")
        async with open_admin(admin_context(it.sending["a"], real_runtime())):
            await no_order_waits(it, "a")
            assert held_back(it, "a") == set(later)
            assert it.sending["a"].sender.registry.state_of(later[0]).paused == "by name"
            await it.sending["a"].sender.operations.hold(*later, paused=None, parked=None)
            await until(lambda: all(times(it, server, good) == 2 for server in of_b))
        assert times(it, of_a[0], good) == 2


def held_back(it: Site, name: str) -> set[str]:
    """The servers that this sender has parked or paused."""
    registry = it.sending[name].sender.registry
    states = {server: registry.state_of(server) for server in it.receivers.servers}
    return {server for server, state in states.items() if state.paused or state.parked}


async def test_a_question_whose_asker_is_cut_off_is_not_left_for_a_sender_that_is_away(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it was back it answered them all, the oldest first, before it answered anybody."""
    async with desks(tmp_path, postgres) as both:
        both.close("b")
        with trio.move_on_after(1.0):
            await both.get("a", "overview")
        assert await rows_left(both.site) == 0

        async def fails(*_: object) -> None:
            raise StoreError("the database is away")

        monkeypatch.setattr(overview_here, "here", fails)
        with pytest.raises(StoreError):
            await both.get("a", "overview")
        assert await rows_left(both.site) == 0


@pytest.mark.parametrize("how", ["a failover", "a restore"])
async def test_an_order_that_was_brought_back_is_not_carried_out(
    how: str, tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was carried out since, perhaps, and undone."""
    async with desks(tmp_path, postgres) as both:
        it = both.site
        server = both.of("b")[0]
        # Nothing is left on record: a restore discards that.
        it.become(well=True)
        await until(it.all_have(200))
        both.close("b")
        await it.stop("b")
        await both.post("a", "purge", {"server": server}, 503)
        both.close("a")
        await it.stop("a")
        if how == "a failover":
            monkeypatch.setattr(requests, "PLACE", literal("the replica"))
        else:
            databases = backup.ours(store_config(it.config("a", ["a", "b"])).ours)
            owner = backup.Owner(HS, "a", tmp_path / "ledger-a")
            await backup.backup(databases, owner, tmp_path / "backup", real_runtime())
            await backup.restore(databases, owner, tmp_path / "backup", real_runtime())
        with capture_logs() as logged:
            await it.start("a", "b")
            both.open("a", "b")
            state_of = it.sending["b"].sender.registry.state_of
            assert await both.post("a", "pause", {"servers": [server]}) == {"servers": [server]}
        assert state_of(server).paused is not None
        (line,) = [each for each in logged if each["event"] == "order_not_carried_out"]
        assert (line["order"], json.loads(line["asked"])["server"]) == ("purge_ours", server)


async def test_orders_for_a_sender_that_is_away_keep_nobody_from_looking(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script wakes all servers each minute, for days. What waits already does not wait twice."""
    monkeypatch.setattr(requests, "MOST", 4)
    async with desks(tmp_path, postgres) as both:
        of_b = both.of("b")[:1]
        both.close("b")
        await both.site.stop("b")
        for _ in range(6):
            await both.post("a", "notify_remote_server_up", {"pattern": "*"})
        assert await rows_left(both.site) <= 2
        for why in "1234":
            said = await both.post("a", "pause", {"servers": of_b, "reason": why}, 503)
        assert said["error"] == "4 orders wait already for senders that are away"
        shown = await both.get("a", "destinations")
        assert {row["destination"] for row in shown["destinations"]} == set(both.of("a"))
