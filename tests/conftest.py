"""For all tests: servers that are started once for those that ask, and a log left as found."""

import gc
import logging
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy
import structlog
from hypothesis import HealthCheck, given, settings, strategies
from sqlalchemy.util import LRUCache
from structlog.dev import ConsoleRenderer, plain_traceback
from tests.forks import Forks, started_by_fork
from tests.servers import Databases, NewUrl, Valkey, open_postgres, open_valkey
from tests.store.ready_made import Tables, lay
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from xdist.remote import Producer

# The tests start hundreds of processes. What one has compiled the others read, whatever the
# environment says of it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# In the background a shell has its programs ignore SIGINT, and ours would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Importing and collecting makes hardly any garbage, and half a million objects to search for it.
gc.disable()

# How long an example takes says something about the machine, and nothing about the code.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# Of an exception that is logged a colourful picture costs more than the test that brings it about.
_PLAIN = [
    *structlog.get_config()["processors"][:-1],
    ConsoleRenderer(exception_formatter=plain_traceback),
]
structlog.configure(processors=_PLAIN)

_SPARK = {
    "spark.driver.memory": "1g",
    # With one compiler the room for its code is 48 MiB, which planning alone fills again and again.
    "spark.driver.extraJavaOptions": (
        "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=192m"
    ),
}
_FIRST = ("spark", "homeserver_a")
"""Fixtures whose servers take long to start, and whose tests take longest."""
_WITH_SPARK = (
    "tests/pipeline/",
    "tests/synapse/test_destination_rooms.py",
    "tests/synapse/test_planted.py",
)
_WITH_SYNAPSE = ("tests/synapse/",)
_LONGEST = (
    "tests/test_standby.py",
    "tests/test_daemon.py",
    "tests/lab/test_cluster.py",
    "tests/test_stories.py",
    "tests/sender/test_failover.py",
    "tests/lab/simulation/test_seeds.py",
    "tests/embedded/test_processes.py",
    "tests/admin/test_browser.py",
    "tests/lab/simulation/test_guards.py",
    "tests/lab/demo/test_whole_demo.py",
    "tests/relay/test_bad_network.py",
)
"""Of the other files, those that take longest although their tests are few."""


class _Groups(LoadFileScheduling):  # type: ignore[misc]
    """Each process takes the next file when it is done with one; some files are taken together.

    So one process starts Spark, and one the Synapses (and the one with Spark, for a single test).
    """

    def _split_scope(self, nodeid: str) -> str:
        for group in (_WITH_SPARK, _WITH_SYNAPSE):
            if nodeid.startswith(group):
                return group[0]
        return str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> _Groups:
    return _Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a server as slow.

    A test of a program that is missing is not run, and the summary says so. On CI, where
    FEDSENDER_ALL_PROGRAMS is set, it is run and fails.

    The two groups begin first, then the longest files, then those with the most slow tests, and
    those of quick ones only are last: so no process has a large file left when the others are done.
    Long tests are left out of a run of everything.
    """
    if items and _leaves_out_long(items[0].config):
        left_out = [item for item in items if item.get_closest_marker("long") is not None]
        items[0].config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    first: set[Path] = set()
    slow: Counter[Path] = Counter()
    for item in items:
        assert isinstance(item, pytest.Function)
        takes_long = any(name in item.fixturenames for name in _FIRST)
        if takes_long:
            first.add(item.path)
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.slow)
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        postgres = "postgres" in item.fixturenames or "postgresql" in map(str, parameters)
        if takes_long or postgres:
            item.add_marker(pytest.mark.slow)
        for program in list(item.iter_markers("program")):
            item.add_marker(pytest.mark.slow)
            name, package = program.args
            if shutil.which(name) is None and not os.environ.get("FEDSENDER_ALL_PROGRAMS"):
                why = f"{name} is missing: apt-get install {package}"
                item.add_marker(pytest.mark.skip(reason=why))
        slow[item.path] += item.get_closest_marker("slow") is not None

    def turn(item: pytest.Item) -> tuple[bool, int, int]:
        name = item.nodeid.partition("::")[0]
        longest = _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)
        return item.path not in first, longest, -slow[item.path]

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """The garbage collector passes by the tests and their modules, which stay to the end.

    It searches seldom, as in a daemon: most of what a test leaves goes with the test.
    """
    # At its first use Hypothesis asks the collector who holds its generator.
    given(strategies.none())(lambda _: None)()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def _leaves_out_long(config: pytest.Config) -> bool:
    """Whether neither `-m` nor a file says which tests are meant."""
    everything = config.args_source is not pytest.Config.ArgsSource.ARGS
    return everything and not config.option.markexpr


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say so, as the last line but one."""
    if _leaves_out_long(config):
        terminalreporter.write_line("left out: long tests; `python -m pytest -m long` runs them")


class _CompiledByDialect(LRUCache[Any, Any]):
    """Compiled statements of all engines, whose keys begin with a dialect of their own each."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((type(key[0]), *key[1:]), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((type(key[0]), *key[1:]), value)


@pytest.fixture(autouse=True, scope="session")
def _statements_are_compiled_once() -> Iterator[None]:
    """As in a daemon that has run for a while, although each test has databases of its own."""
    options = {"compiled_cache": _CompiledByDialect(2_000)}
    create = partial(sqlalchemy.create_engine, execution_options=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsender.store.connections.create_engine", create)
        yield


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """What a test configures of the log does not reach the next one."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    structlog.reset_defaults()
    structlog.configure(processors=_PLAIN)
    root.handlers, root.level = handlers, level


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """The process that is forked for starts of our programs."""
    forks = Forks()
    yield forks
    forks.end()


@pytest.fixture(autouse=True)
def _short_starts(request: pytest.FixtureRequest, forks: Forks) -> Iterator[None]:
    """A start of our program is a fork; those of long tests are not."""
    if request.node.get_closest_marker("long") is not None:
        yield
        return
    with started_by_fork(forks):
        yield


@pytest.fixture
def ignored_sigterm() -> Iterator[None]:
    """One that comes when nobody waits for it does not end the tests."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def _databases() -> Iterator[Databases]:
    with open_postgres() as server:
        yield Databases(server)


@pytest.fixture
def postgres(_databases: Databases) -> Iterator[Databases]:
    """A PostgreSQL; `create_database()` gives the URL of an empty database, for this test."""
    yield _databases
    # A test that failed half-way must not take the next one with it.
    if not _databases.server.running:
        _databases.start()
    _databases.give_back()


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> NewUrl:
    """Of a test that runs on SQLite, and again on PostgreSQL."""
    if request.param == "sqlite":
        numbers = iter(range(1_000))

        def new(tables: Tables | None = None) -> str:
            path = tmp_path / f"{next(numbers)}.db"
            return f"sqlite:///{path}" if tables is None else lay(path, tables)

        return new
    postgres: Databases = request.getfixturevalue("postgres")
    return postgres.create_schema


@pytest.fixture(scope="session")
def _valkey_server() -> Iterator[Valkey]:
    with open_valkey() as server:
        yield server


@pytest.fixture
def valkey(_valkey_server: Valkey) -> Valkey:
    """A Valkey at `.host` and `.port`."""
    if not _valkey_server.running:
        _valkey_server.start()
    return _valkey_server


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """A Spark for few rows, here, with two threads: starting one takes longer than most tests."""
    # Here, because the tests of the daemon can do without Spark.
    from fedsender.config import Spark
    from fedsender_pipeline.session import spark_session

    logs = tmp_path_factory.mktemp("spark")
    with spark_session(Spark(master="local[2]", settings=_SPARK), "tests", logs, 0) as session:
        yield session
