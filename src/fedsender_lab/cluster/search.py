"""A search of all states of a model: every possible step, in every order, faults included."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

State = TypeVar("State")


class Model(Protocol[State]):
    """The states of a protocol, which are hashable, and the steps between them."""

    def begin(self) -> State:
        """The first state."""
        ...

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Every step that is possible here: its words, and the state after it."""
        ...

    def wrong(self, state: State) -> str | None:
        """What is wrong with this state, whatever comes next; None: nothing."""
        ...

    def calm(self, state: State) -> State | None:
        """The state after one more step of a world without faults; None: it has come to rest."""
        ...

    def missing(self, state: State) -> str | None:
        """What is not served in a state at rest; None: nothing."""
        ...

    def words(self, state: State) -> str:
        """The state in one line."""
        ...


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        states: number of states.
        wrong: what is wrong in the last state of `trace`; None: in no state anything is.
        trace: the shortest way there, a line for each step.
    """

    states: int
    wrong: str | None = None
    trace: Sequence[str] = ()

    def __str__(self) -> str:
        if self.wrong is None:
            return f"{self.states} states, nothing wrong"
        return "\n".join([*self.trace, f"=> {self.wrong}"])


MOST_STATES: Final = 1_000_000
MOST_CALM_STEPS: Final = 500


def explore(model: Model[State], most: int = MOST_STATES) -> Found:
    """Search all states of the model, breadth first, until one is wrong.

    A state is wrong by itself, or because somebody stays unserved though all is well from there on.
    Raises RuntimeError after `most` states: what is not searched whole shows nothing.
    """
    first = model.begin()
    came: dict[State, tuple[State, str] | None] = {first: None}
    rests_well: set[State] = set()
    line = deque([first])
    while line:
        state = line.popleft()
        wrong = model.wrong(state) or _wrong_at_rest(model, state, rests_well)
        if wrong is not None:
            return Found(len(came), wrong, list(_trace(model, came, state)))
        for words, after in model.steps(state):
            if after not in came:
                came[after] = state, words
                line.append(after)
        if len(came) > most:
            raise RuntimeError(f"more than {most} states")
    return Found(len(came))


def _wrong_at_rest(model: Model[State], state: State, rests_well: set[State]) -> str | None:
    way: list[State] = []
    at: State | None = state
    while at is not None and at not in rests_well:
        way.append(at)
        if wrong := model.wrong(at):
            return f"once all is well: {wrong}"
        if len(way) > MOST_CALM_STEPS:
            return "once all is well it does not come to rest"
        at = model.calm(at)
    if at is None and (missing := model.missing(way[-1])):
        return f"once all is well: {missing}"
    rests_well.update(way)
    return None


def _trace(
    model: Model[State], came: Mapping[State, tuple[State, str] | None], state: State
) -> Iterator[str]:
    lines: list[str] = []
    at = state
    while (step := came[at]) is not None:
        lines.append(f"{step[1]:<58} {model.words(at)}")
        at = step[0]
    yield f"{'   at first':<62} {model.words(at)}"
    for number, line in enumerate(reversed(lines), 1):
        yield f"{number:>2}. {line}"


def less(faults: tuple[str, ...], fault: str) -> tuple[str, ...]:
    """The faults that may still happen, after this one has."""
    at = faults.index(fault)
    return (*faults[:at], *faults[at + 1 :])
