"""What keeps us waiting does not hold up the rest: look-ups, and requests for .well-known."""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from tests.federation.servers import NAME, AnybodyMay, Authority, TableNetwork, client_of

from fedsender.config import Policy
from fedsender.federation.dialing import Unreachable
from fedsender.federation.discovery import Discovery
from fedsender.federation.discovery_cache import DiscoveryCache
from fedsender.federation.places import PER_SITE, Displaced, Places
from fedsender.runtime import NameNotFound, RealNetwork, Records, RecordType, ResolveFailed

PLACES = 300


class Tarpits(RealNetwork):
    """A DNS in which evil names are never answered, those of slow ones after 3 s.

    Attributes:
        asking: how many wait for an answer, by the last two labels of the name.
        most: how many ever did, in all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asking: Counter[str] = Counter()
        self.most = 0

    async def resolve(
        self, name: str, rdtype: RecordType, nameservers: Sequence[tuple[str, int]] = ()
    ) -> Records:
        domain = ".".join(name.split(".")[-2:])
        self.asking[domain] += 1
        self.most = max(self.most, self.asking.total())
        try:
            if "evil" in name:
                await trio.sleep(5)
                raise ResolveFailed(f"{name}: no name server answered")
            await trio.sleep(3 if "slow" in name else 0.02)
        finally:
            self.asking[domain] -= 1
        if rdtype == "A":
            return Records(("192.0.2.1",), 300)
        raise NameNotFound(f"{name}: no {rdtype} record", ttl_s=300)


def discovery_with(network: Tarpits) -> Discovery:
    return Discovery(
        network,
        random.Random(1),
        lambda: 0,
        DiscoveryCache(20_000),
        concurrent_lookups=PLACES,
        lookup_s=10,
    )


async def found(discovery: Discovery, name: str) -> bool:
    """Whether the two look-ups for the addresses of a name find one."""
    try:
        return bool(await discovery.addresses(name, of=name))
    except Unreachable:
        return False


async def besiege(discovery: Discovery, domain: str) -> None:
    """A thousand names that are never answered, asked for again and again."""

    async def keep_asking(name: str) -> None:
        while True:
            assert not await found(discovery, name)
            await trio.sleep(30)

    async with trio.open_nursery() as nursery:
        for number in range(1000):
            nursery.start_soon(keep_asking, f"a{number}.{domain}".format(number))


ONE_DOMAIN_OR_A_THOUSAND = pytest.mark.parametrize(
    "domain", ["evil.example", "evil{}.example"], ids=["one", "thousand"]
)


@pytest.mark.slow
@ONE_DOMAIN_OR_A_THOUSAND
async def test_tarpits_delay_an_honest_look_up_by_two_seconds_at_most(
    domain: str, autojump_clock: trio.testing.MockClock
) -> None:
    network = Tarpits()
    discovery = discovery_with(network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(besiege, discovery, domain)
        for number in range(100):
            await trio.sleep(0.37)
            began = trio.current_time()
            assert await found(discovery, f"good{number}.example")
            assert trio.current_time() - began <= 2 * 2.1
        nursery.cancel_scope.cancel()
    # Those that end leave in the same turn of the loop as others begin.
    assert network.most < 2 * PLACES


@pytest.mark.slow
@ONE_DOMAIN_OR_A_THOUSAND
async def test_slow_but_honest_servers_are_found_in_the_end(
    domain: str, autojump_clock: trio.testing.MockClock
) -> None:
    """More of them under one domain than may be slow at once, and in the worst company."""
    discovery, rng = discovery_with(Tarpits()), random.Random(1)

    async def keep_asking(name: str) -> None:
        for _ in range(100):
            if await found(discovery, name):
                return
            await trio.sleep(rng.uniform(30, 60))
        pytest.fail(f"{name} is not found in an hour")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(besiege, discovery, domain)
        async with trio.open_nursery() as honest:
            for number in range(40):
                honest.start_soon(keep_asking, f"b{number}.slow.example")
        nursery.cancel_scope.cancel()


async def test_while_there_is_room_slow_look_ups_have_their_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    discovery = discovery_with(Tarpits())
    results = []

    async def ask(name: str) -> None:
        results.append(await found(discovery, name))

    async with trio.open_nursery() as nursery:
        for number in range(PLACES):
            nursery.start_soon(ask, f"b{number}.slow.example")
    assert results == [True] * PLACES
    assert trio.current_time() == pytest.approx(6, abs=0.1)


@pytest.mark.slow
async def test_a_first_start_with_many_dead_names_finds_the_others_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """As many servers a second as the ramp starts by default, a third of them gone for good."""
    discovery = discovery_with(Tarpits())
    took: list[float] = []

    async def start(name: str) -> None:
        began = trio.current_time()
        if await found(discovery, name):
            took.append(trio.current_time() - began)

    async with trio.open_nursery() as nursery:
        for number in range(3000):
            name = f"evil{number}.example" if number % 3 == 0 else f"good{number}.example"
            nursery.start_soon(start, name)
            await trio.sleep(0.01)
    assert len(took) == 2000
    assert sorted(took)[1980] < 2


class Silent(TableNetwork):
    """Where web servers take a connection and nothing follows, but for the one at 10.0.0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.open = self.most = 0

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        self.dialled.append((address, port))
        if address == "10.0.0.1" or port != 443:
            raise ConnectionRefusedError
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await trio.sleep_forever()
        finally:
            self.open -= 1
        raise AssertionError


@pytest.mark.slow
async def test_silent_web_servers_hold_up_no_other_well_known(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    Authority(tmp_path)
    network = Silent()
    network.records[NAME, "A"] = ["10.0.0.1"]
    async with client_of(tmp_path, network) as client, trio.open_nursery() as nursery:

        async def connect(name: str) -> None:
            async with client.peer(name, Policy(), AnybodyMay()) as peer:
                with suppress(Unreachable):
                    await peer.connect()

        for number in range(1000):
            name = f"a{number}.evil.example"
            network.records[name, "A"] = [f"10.1.{number // 256}.{number % 256}"]
            nursery.start_soon(connect, name)
        await trio.sleep(1)
        began = trio.current_time()
        await connect(NAME)
        assert [port for ip, port in network.dialled if ip == "10.0.0.1"] == [443, 8448]
        assert trio.current_time() - began <= 2.1
        assert network.most < 1000
        nursery.cancel_scope.cancel()


async def test_few_of_one_site_are_slow_at_once(autojump_clock: trio.testing.MockClock) -> None:
    places = Places(20)
    held: Counter[str] = Counter()
    displaced: Counter[str] = Counter()

    async def hold(domain: str, number: int) -> None:
        try:
            async with places.take(f"_matrix._tcp.b{number}.{domain.upper()}"):
                held[domain] += 1
                await trio.sleep(100)
        except Displaced:
            displaced[domain] += 1

    async def come(number: int) -> None:
        async with places.take(f"good{number}.example"):
            await trio.sleep(100)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(hold, "one.co.uk", number)
            nursery.start_soon(hold, "other.co.uk", number)
        await trio.sleep(1)
        for number in range(18):
            nursery.start_soon(come, number)
        await trio.sleep(0.5)
        assert (places.taken, places.slow) == (20, 0)
        await trio.sleep(1)
        # Only as many gave up their places as others came for.
        assert (places.taken, places.slow) == (28, 2 * PER_SITE)
        assert displaced.total() == 10
        nursery.cancel_scope.cancel()
    assert places.slow == places.taken == 0


async def test_who_waits_in_vain_leaves_nothing_behind(
    autojump_clock: trio.testing.MockClock,
) -> None:
    places = Places(1)
    async with places.take("a.example"):
        for _ in range(3):
            with trio.move_on_after(0.5):
                async with places.take("b.example"):
                    pytest.fail("there was no room")
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                async with places.take("c.example"):
                    assert trio.current_time() == pytest.approx(2)

            nursery.start_soon(wait)
    assert places.slow == places.taken == 0
