"""Server discovery: the specification's steps, as a table and against whatever the DNS says."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsender.federation.dialing import Unreachable
from fedsender.federation.discovery import (
    MAX_CANDIDATES,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    Answer,
    AskDns,
    AskWellKnown,
    Question,
    Resolution,
    Resolved,
    Srv,
    in_srv_order,
    is_literal,
    kept_records,
    parse_srv,
)
from fedsender.federation.discovery_cache import (
    Delegation,
    Lookup,
)

Dns = Mapping[tuple[str, str], Sequence[str] | str]
NOW_MS = 1_700_000_000_000


def answer_from(dns: Dns, well_known: Mapping[str, str], question: object) -> Answer:
    if isinstance(question, AskWellKnown):
        server = well_known.get(question.host)
        return Delegation(server, 0, 0, text="" if server else "status 404")
    assert isinstance(question, AskDns)
    found = dns.get((question.name, question.rdtype), ())
    if isinstance(found, str):
        return Lookup((), 0, found, failed=True)
    text = "" if found else f"{question.name}: no {question.rdtype} record"
    return Lookup(tuple(found), 0, text)


def ask(name: str, answer: Callable[[Question], Answer], fixed: str | None = None) -> Resolved:
    steps = Resolution(random.Random(1)).steps(name, fixed)
    try:
        question = next(steps)
        while True:
            question = steps.send(answer(question))
    except StopIteration as end:
        return cast("Resolved", end.value)


def resolve(
    name: str,
    dns: Dns,
    well_known: Mapping[str, str] | None = None,
    fixed_address: str | None = None,
) -> tuple[Resolved, list[object]]:
    asked: list[object] = []

    def answer(question: Question) -> Answer:
        asked.append(question)
        return answer_from(dns, well_known or {}, question)

    return ask(name, answer, fixed_address), asked


HOST: Dns = {("b.example", "A"): ["192.0.2.1"], ("b.example", "AAAA"): ["2001:db8::1"]}
SRV: Dns = {
    ("_matrix-fed._tcp.b.example", "SRV"): ["10 5 8000 m.b.example."],
    ("m.b.example", "A"): ["192.0.2.9"],
}
OLD_SRV: Dns = {
    ("_matrix._tcp.b.example", "SRV"): ["10 5 8001 m.b.example."],
    ("m.b.example", "A"): ["192.0.2.9"],
}
DELEGATED: Dns = {("d.example", "A"): ["192.0.2.7"]}
DELEGATED_SRV: Dns = {
    ("_matrix-fed._tcp.d.example", "SRV"): ["0 0 443 s.example."],
    ("s.example", "A"): ["192.0.2.8"],
}


@pytest.mark.parametrize(
    ("name", "dns", "well_known", "host_header", "tls_name", "candidates"),
    [
        # Step 1: a literal.
        ("192.0.2.5", {}, {}, "192.0.2.5", "192.0.2.5", [("192.0.2.5", 8448)]),
        ("192.0.2.5:99", {}, {}, "192.0.2.5:99", "192.0.2.5", [("192.0.2.5", 99)]),
        ("[2001:db8::5]", {}, {}, "[2001:db8::5]", "2001:db8::5", [("2001:db8::5", 8448)]),
        ("[2001:db8::5]:9", {}, {}, "[2001:db8::5]:9", "2001:db8::5", [("2001:db8::5", 9)]),
        # Step 2: a port.
        (
            "b.example:99",
            {**HOST, **SRV},
            {"b.example": "d.example"},
            "b.example:99",
            "b.example",
            [("2001:db8::1", 99), ("192.0.2.1", 99)],
        ),
        # Step 3: delegated, to a literal, a port, a name with and without SRV.
        (
            "b.example",
            HOST,
            {"b.example": "192.0.2.6"},
            "192.0.2.6",
            "192.0.2.6",
            [("192.0.2.6", 8448)],
        ),
        (
            "b.example",
            HOST,
            {"b.example": "[::2]:77"},
            "[::2]:77",
            "::2",
            [("::2", 77)],
        ),
        (
            "b.example",
            {**HOST, **DELEGATED, **DELEGATED_SRV},
            {"b.example": "d.example:443"},
            "d.example:443",
            "d.example",
            [("192.0.2.7", 443)],
        ),
        (
            "b.example",
            {**HOST, **SRV, **DELEGATED, **DELEGATED_SRV},
            {"b.example": "d.example"},
            "d.example",
            "d.example",
            [("192.0.2.8", 443)],
        ),
        (
            "b.example",
            {**HOST, **SRV, **DELEGATED},
            {"b.example": "d.example"},
            "d.example",
            "d.example",
            [("192.0.2.7", 8448)],
        ),
        # A delegated name is not delegated further.
        (
            "b.example",
            {**HOST, **DELEGATED},
            {"b.example": "d.example", "d.example": "e.example"},
            "d.example",
            "d.example",
            [("192.0.2.7", 8448)],
        ),
        # Steps 4 to 6: SRV, the old SRV, the default port.
        (
            "b.example",
            {**HOST, **SRV, **OLD_SRV},
            {},
            "b.example",
            "b.example",
            [("192.0.2.9", 8000)],
        ),
        ("b.example", {**HOST, **OLD_SRV}, {}, "b.example", "b.example", [("192.0.2.9", 8001)]),
        (
            "b.example",
            HOST,
            {},
            "b.example",
            "b.example",
            [("2001:db8::1", 8448), ("192.0.2.1", 8448)],
        ),
        # Names are compared as the DNS compares them, and shown as they were given.
        (
            "B.Example",
            HOST,
            {},
            "B.Example",
            "B.Example",
            [("2001:db8::1", 8448), ("192.0.2.1", 8448)],
        ),
    ],
)
def test_name_resolves_by_the_steps_of_the_specification(
    name: str,
    dns: Dns,
    well_known: dict[str, str],
    host_header: str,
    tls_name: str,
    candidates: list[tuple[str, int]],
) -> None:
    resolved, _ = resolve(name, dns, well_known)
    assert resolved.host_header == host_header
    assert resolved.tls_name == tls_name
    assert list(resolved.candidates) == candidates


@pytest.mark.parametrize(
    ("dns", "text"),
    [
        ({}, "b.example: no A record"),
        ({("_matrix-fed._tcp.b.example", "SRV"): "SERVFAIL", **HOST}, "SERVFAIL"),
        ({("_matrix._tcp.b.example", "SRV"): "timed out", **HOST}, "timed out"),
        ({("_matrix-fed._tcp.b.example", "SRV"): ["0 0 0 ."], **HOST}, "no such service"),
        ({("_matrix-fed._tcp.b.example", "SRV"): ["0 0 1 gone.example."]}, "gone.example"),
        ({("b.example", "A"): ["not an address"]}, "no AAAA record"),
    ],
)
def test_name_without_an_address_says_why(dns: Dns, text: str) -> None:
    with pytest.raises(Unreachable, match=text) as caught:
        resolve("b.example", dns)
    assert caught.value.kind == "dns"
    assert "well-known of b.example: status 404" in caught.value.text


@pytest.mark.parametrize(
    ("well_known", "text"),
    [
        ("b.example: no such name", "b.example: no such name"),
        ("status 404", "b.example: no such name; .well-known of b.example: status 404"),
    ],
)
def test_what_stands_in_the_way_of_several_look_ups_is_said_once(
    well_known: str, text: str
) -> None:
    def answer(question: Question) -> Answer:
        if isinstance(question, AskWellKnown):
            return Delegation(None, 0, 0, text=well_known)
        return Lookup((), 0, "b.example: no such name")

    with pytest.raises(Unreachable) as caught:
        ask("b.example", answer)
    assert caught.value.text == text


def test_fixed_address_skips_everything_but_the_names() -> None:
    resolved, asked = resolve("b.example", {}, fixed_address="10.0.0.5:9000")
    assert resolved == Resolved("b.example", "b.example", (("10.0.0.5", 9000),))
    assert asked == []


def test_srv_record_leads_to_each_of_its_targets_in_order() -> None:
    dns: Dns = {
        ("_matrix-fed._tcp.b.example", "SRV"): [
            "20 0 3 c.example.",
            "10 0 1 a.example.",
            "15 0 2 192.0.2.2.",
        ],
        ("a.example", "A"): ["192.0.2.1"],
        ("c.example", "A"): ["192.0.2.3"],
    }
    resolved, _ = resolve("b.example", dns)
    assert resolved.candidates == (("192.0.2.1", 1), ("192.0.2.2", 2), ("192.0.2.3", 3))


hosts = st.sampled_from(["a.example", "b.example", "c.example", "_x.example", "", ".", "a b"])
names = st.one_of(hosts, st.sampled_from(["192.0.2.1", "::1", "127.1"]), st.text(max_size=20))
srv_values = st.builds(
    lambda *parts: " ".join(map(str, parts)),
    *[st.integers(-1, 70_000)] * 3,
    names,
) | st.text(max_size=30)


@pytest.mark.slow
@given(data=st.data(), port=st.none() | st.integers(1, 65_535))
def test_whatever_the_dns_says_resolution_ends_soon_and_with_addresses(
    data: st.DataObject, port: int | None
) -> None:
    name = "b.example" if port is None else f"b.example:{port}"
    questions = 0

    def answer(question: Question) -> Answer:
        nonlocal questions
        questions += 1
        assert questions <= 16
        if isinstance(question, AskWellKnown):
            servers = [None, "d.example", "d.example:8", "[::1]", "1.2.3.4"]
            return Delegation(data.draw(st.sampled_from(servers)), 0, 0)
        values = data.draw(st.lists(srv_values if question.rdtype == "SRV" else names, max_size=20))
        return Lookup(tuple(values), 0, "x", failed=data.draw(st.booleans()))

    try:
        resolved = ask(name, answer)
    except Unreachable:
        return
    assert 1 <= len(resolved.candidates) <= MAX_CANDIDATES
    assert all(is_literal(ip) and 0 < port < 65_536 for ip, port in resolved.candidates)


@pytest.mark.parametrize("name", ["", "a b", "b.example:0", "b.example:x", "[::1", "http://b"])
def test_what_is_no_server_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        resolve(name, {})


@pytest.mark.slow
@given(
    st.lists(
        st.builds(Srv, st.integers(0, 3), st.integers(0, 5), st.just(1), st.text("abc", min_size=1))
    ),
    st.randoms(use_true_random=False),
)
def test_srv_order_keeps_every_record_and_puts_priority_first(
    records: list[Srv], rng: random.Random
) -> None:
    ordered = in_srv_order(records, rng)
    assert sorted(ordered, key=repr) == sorted(records, key=repr)
    assert [each.priority for each in ordered] == sorted(each.priority for each in records)


def test_srv_weight_is_the_chance_to_be_first() -> None:
    light, heavy, none = Srv(0, 10, 1, "light"), Srv(0, 30, 1, "heavy"), Srv(0, 0, 1, "none")
    rng = random.Random(5)
    first = [in_srv_order([light, none, heavy], rng)[0].target for _ in range(4_000)]
    assert 0.20 < first.count("light") / 4_000 < 0.30
    assert 0.65 < first.count("heavy") / 4_000 < 0.80
    assert 0 < first.count("none") / 4_000 < 0.06


def test_malformed_srv_records_are_left_out() -> None:
    values = ("1 2 3 a.", "1 2 3", "1 2 65536 b.", "1 2 0 c.", "70000 1 1 d.", "1 2 3 e\\.f.")
    assert parse_srv(values) == [Srv(1, 2, 3, "a")]


def test_what_is_kept_of_an_answer_has_a_size() -> None:
    long = tuple(f"1 2 {port} {'x' * 240}." for port in range(1, 101))
    assert sum(map(len, kept_records(long))) <= MAX_RECORD_BYTES
    assert kept_records(long) == long[:4]
    short = tuple(f"192.0.2.{number}" for number in range(100))
    assert kept_records(short) == short[:MAX_RECORDS]
