"""What a shadow calls a difference, and what it does not."""

from fedsender.store.shadowed import Stand
from fedsender.switching import comparison as comparison_module
from fedsender.switching.comparison import LATE_S, Comparison, Difference, Expected

ROOM = "!r:us.example"
ONE, TWO = "one.example", "two.example"


def event(stream_ordering: int, *servers: str, target: str | None = None) -> Expected:
    return Expected(f"${stream_ordering}", ROOM, stream_ordering, frozenset(servers), target)


def compare(
    comparison: Comparison,
    position: int,
    rows: dict[str, int],
    partial: frozenset[str] = frozenset(),
) -> list[Difference]:
    return comparison.compare(comparison.due(position, 100), {ROOM: rows}, set(partial))


def a_comparison(*events: Expected, ours: tuple[str, ...] = (ONE, TWO)) -> Comparison:
    comparison = Comparison(10, lambda server: server in ours)
    for expected in events:
        comparison.expect(expected, 0.0)
    return comparison


def test_what_synapse_recorded_as_we_would_have_is_no_difference() -> None:
    comparison = a_comparison(event(11, ONE, TWO), event(12, ONE))
    assert compare(comparison, 12, {ONE: 12, TWO: 11}) == []
    assert comparison.compared == 2


def test_an_event_is_not_judged_before_synapses_worker_has_passed_it() -> None:
    comparison = a_comparison(event(11, ONE), event(12, ONE))
    assert compare(comparison, 11, {ONE: 11}) == []
    assert comparison.uncompared == 1


def test_a_server_that_synapse_does_not_mean_to_tell_is_a_difference() -> None:
    found = compare(a_comparison(event(11, ONE, TWO)), 11, {ONE: 11, TWO: 9})
    assert [(each.kind, each.server, each.explained) for each in found] == [
        ("not owed", TWO, False)
    ]


def test_a_server_that_only_synapse_would_tell_is_a_difference() -> None:
    found = compare(a_comparison(event(11, ONE)), 11, {ONE: 11, TWO: 11})
    assert [(each.kind, each.server) for each in found] == [("owed too", TWO)]


def test_an_event_that_is_not_ours_to_send_but_that_synapse_sends_is_a_difference() -> None:
    found = compare(a_comparison(event(11)), 11, {ONE: 11})
    assert [(each.kind, each.server) for each in found] == [("owed too", ONE)]


def test_other_shards_servers_are_none_of_ours() -> None:
    assert compare(a_comparison(event(11, ONE), ours=(ONE,)), 11, {ONE: 11, TWO: 11}) == []


def test_w26_explains_the_server_of_a_banned_invited_user() -> None:
    """W26: Synapse does not tell it, we do."""
    found = compare(a_comparison(event(11, ONE, TWO, target=TWO)), 11, {ONE: 11})
    assert [(each.server, each.because, each.explained) for each in found] == [(TWO, "W26", True)]


def test_w24_explains_a_room_with_partial_state() -> None:
    """W24: there Synapse only knows the servers of when it joined."""
    found = compare(a_comparison(event(11, ONE)), 11, {}, frozenset({ROOM}))
    assert [each.because for each in found] == ["W24"]


def test_a_room_that_was_purged_owes_nobody() -> None:
    comparison = a_comparison(event(11, ONE))
    assert comparison.compare(comparison.due(11, 100), {}, set()) == []


def test_a_server_is_called_late_once_and_not_while_synapse_waits_for_it() -> None:
    comparison = a_comparison(event(11, ONE, TWO))
    compare(comparison, 11, {ONE: 11, TWO: 11})
    stands = {ONE: Stand(10, waiting=False), TWO: Stand(10, waiting=True)}
    assert comparison.answered(stands, LATE_S - 1) == []
    assert [each.server for each in comparison.answered(stands, LATE_S + 1)] == [ONE]
    assert comparison.answered(stands, LATE_S + 2) == []

    assert comparison.answered({ONE: Stand(11, waiting=False)}, 90.0) == []
    assert list(comparison.answer_s) == [90.0]
    assert comparison.awaited() == [TWO]


def test_a_worker_that_is_behind_is_told_of_once_until_it_has_caught_up() -> None:
    """An operator whose worker has died must not read that there is no difference."""
    comparison = a_comparison(event(11, ONE), event(12, ONE))
    assert comparison.behind(LATE_S) == []
    assert [(each.kind, each.server, each.event_id) for each in comparison.behind(LATE_S + 1)] == [
        ("behind", None, "$11")
    ]
    assert all(each.explained for each in a_comparison(event(11, ONE)).behind(LATE_S + 1))
    compare(comparison, 11, {ONE: 11})
    assert comparison.behind(LATE_S + 2) == []
    compare(comparison, 12, {ONE: 12})
    assert comparison.behind(LATE_S + 3) == []
    comparison.expect(event(13, ONE), 100.0)
    assert [each.event_id for each in comparison.behind(101.0 + LATE_S)] == ["$13"]


def test_direct_messages_that_lie_about_are_told_once_per_episode() -> None:
    comparison, stands = a_comparison(), {TWO: Stand(None, waiting=True)}
    old = {ONE: 0, TWO: 0, "other.example": 0}
    now_ms = int(LATE_S * 1000) + 1
    assert [each.server for each in comparison.to_device(old, stands, now_ms)] == [ONE]
    assert comparison.to_device(old, stands, now_ms) == []
    assert comparison.to_device({}, stands, now_ms) == []
    assert [each.server for each in comparison.to_device(old, stands, now_ms)] == [ONE]


def test_its_memory_is_bounded_and_what_it_leaves_out_is_counted() -> None:
    """A worker that is stopped for days, or a server that never answers, costs no more."""
    comparison = a_comparison()
    for number in range(11, 11 + comparison_module.MAX_UNANSWERED + 50):
        comparison.expect(event(number, ONE), 0.0)
        compare(comparison, number, {ONE: number})
    assert comparison.passed_over == 50
    newest = 10 + comparison_module.MAX_UNANSWERED + 50
    assert comparison.answered({ONE: Stand(newest - 1, waiting=False)}, 1.0) == []
    assert comparison.awaited() == [ONE]
    comparison.answered({ONE: Stand(newest, waiting=False)}, 1.0)
    assert comparison.awaited() == []
