"""The image of docs/Containerfile, built without a container engine and used as an engine would.

Its base is a small Debian under the base's name, with the same Python. Packages come from a
directory of wheels, so that the build does not depend on what pip is told on this machine.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml
from tests.embedded.support import ROOM_VERSION, TOKEN
from tests.servers import free_port

from fedsender import version
from fedsender.matrix import ROOM_VERSIONS
from fedsender.runtime import real_runtime
from fedsender_lab.demo import process
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.receiver import Receivers, failing, healthy, open_receivers
from fedsender_lab.testing.rooms import new_timeline
from fedsender_lab.testing.rules import pdu_reader

pytestmark = [
    pytest.mark.long,
    # The first test waits for a Debian and an image.
    pytest.mark.timeout(2400),
    pytest.mark.program("buildah", "buildah"),
    pytest.mark.program("mmdebstrap", "mmdebstrap"),
    pytest.mark.skipif(
        os.geteuid() != 0 and not os.environ.get("FEDSENDER_ALL_PROGRAMS"),
        reason="only root may build an image without an engine",
    ),
]

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120.0
USER = f"@a:{process.SERVER_NAME}"
MOST_BYTES = 130e6
STATE = "/var/lib/fedsender"

# A read-only root, /tmp and the two mounts of the compose example: ROOT CONFIGURATION STATE USER
# DIRECTORY ENV COMMAND... It becomes the command, so signals reach that.
ENGINE = """
root=$1 etc=$2 state=$3 user=$4 directory=$5 env=$6
shift 6
mkdir -p "$root/etc/fedsender"
mount --bind "$root" "$root"
mount --bind "$etc" "$root/etc/fedsender"
mount -o remount,bind,ro "$root/etc/fedsender"
mount --bind "$state" "$root/var/lib/fedsender"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -o remount,bind,ro "$root"
exec chroot --userspec="$user" "$root" \
    /usr/bin/env -i -C "$directory" "$env" HOME="$directory" "$@"
"""


@dataclass(frozen=True)
class Buildah:
    """Debian's buildah with a store of its own."""

    directory: Path

    def __call__(self, *arguments: str | Path) -> str:
        store: list[str | Path] = [
            "--root",
            self.directory / "store",
            "--runroot",
            self.directory / "run",
        ]
        command = ["buildah", *store, "--storage-driver", "vfs", *arguments]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.strip()

    @property
    def mounts(self) -> list[str]:
        places = ("wheels", "etc/pip.conf")
        return [f"--volume={self.directory}/{each}:/{each}:ro" for each in places]

    def bytes_of(self, image: str) -> float:
        size, unit = self("images", "--format", "{{.Size}}", image).split()
        assert unit == "MB"
        return float(size) * 1e6

    def build(self, tree: Path, name: str) -> "Image":
        """The image of this tree, its root mounted."""
        self(
            *("bud", "--isolation", "chroot", "--pull=never", "--format", "docker", *self.mounts),
            *("--timestamp", "0"),
            *("-f", tree / "docs/Containerfile", "-t", name, tree),
        )
        root = Path(self("mount", self("from", "--pull=never", name)))
        return Image(root, json.loads(self("inspect", "--type", "image", name))["Docker"]["config"])


@dataclass(frozen=True)
class Image:
    """An image: its files, and what it says about its use (as Docker names it)."""

    root: Path
    config: dict[str, Any]

    def command(self, etc: Path, state: Path, *command: str) -> list[str]:
        """How a container of this image is run; no command: the image's own."""
        script = command or (*self.config["Entrypoint"], *self.config["Cmd"])
        (env,) = self.config["Env"]
        arguments = [str(each) for each in (self.root, etc, state)]
        arguments += [self.config["User"], self.config["WorkingDir"], env]
        return ["unshare", "--mount", "bash", "-euc", ENGINE, "engine", *arguments, *script]

    def run(self, etc: Path, state: Path, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(etc, state, *command),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )


def python_of_the_image() -> str:
    (version,) = re.findall(
        r"^ARG PYTHON=(.+)$", (ROOT / "docs/Containerfile").read_text(), re.MULTILINE
    )
    assert isinstance(version, str)
    return version


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """One that has the base, and the wheels for a build."""
    directory = tmp_path_factory.mktemp("image")
    buildah = Buildah(directory)
    python = python_of_the_image()
    locked = [f"-r{ROOT}/.ci/locked/{name}.txt" for name in ("fedsender", "tools")]
    download = ["pip", "download", "-q", "--only-binary=:all:", "--python-version", python]
    try:
        subprocess.run(
            [sys.executable, "-m", *download, "-d", directory / "wheels", *locked],
            check=True,
            timeout=600,
        )
        (directory / "etc").mkdir()
        (directory / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        packages = "ca-certificates,python-is-python3,python3-pip,python3-venv"
        debian = directory / "debian.tar"
        subprocess.run([ROOT / ".ci/debian", "trixie", debian, packages], check=True, timeout=800)
        container = buildah("from", "scratch")
        buildah("add", container, debian, "/")
        buildah("commit", container, f"python:{python}-slim")
        debian.unlink()
        yield buildah
    finally:
        # Some GB, which the directory of a test run would keep.
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def image(buildah: Buildah) -> Image:
    return buildah.build(ROOT, "fedsender")


@pytest.fixture(scope="module")
def newer(buildah: Buildah, image: Image, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image of a later version, which changes the tables of the store's two databases."""
    tree = tmp_path_factory.mktemp("newer")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in (".ci", "alembic", "docs", "src"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for line in ("homeserver", "sender"):
        versions = tree / "alembic" / line / "versions"
        last = max(path.name.split("_")[0] for path in versions.glob("[0-9]*_*.py"))
        next_ = f"{int(last) + 1:0{len(last)}}"
        (versions / f"{next_}_later.py").write_text(
            f'revision = "{line}_{next_}"\ndown_revision = "{line}_{last}"\n'
            f"compat = {int(next_)}\n\n\n"
            "def upgrade() -> None:\n    pass\n"
        )
    return buildah.build(tree, "newer")


def test_a_release_is_made_of_its_tag_alone(buildah: Buildah, tmp_path: Path) -> None:
    """The base and what it installs come from the same places as those of the other images."""
    tree, out, tag = tmp_path / "tree", tmp_path / "out", version()
    subprocess.run(["git", "clone", "-q", ROOT, tree], check=True)
    subprocess.run(["git", "-C", tree, "tag", tag], check=True)
    (tree / "docs/changelog.md").write_text("not committed")
    storage = tmp_path / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{buildah.directory}/store"\n'
        f'runroot = "{buildah.directory}/run"\n'
    )
    environ = {"CONTAINERS_STORAGE_CONF": str(storage), "DEBEMAIL": "packages@fedsender.test"}
    done = subprocess.run(
        [tree / ".ci/release", tag, out, "--isolation=chroot", "--pull=never", *buildah.mounts],
        env={**os.environ, **environ},
        capture_output=True,
        encoding="utf-8",
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, check=True)
    names = [line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()]
    made = {re.sub(r"_[a-z0-9]+(?=\.(deb|cdx))", "", name.replace(tag, "V")) for name in names}
    assert made == {
        *(f"fedsender-V-py3-none-any.{what}" for what in ("whl", "cdx.json")),
        *(f"fedsender_V.{what}" for what in ("deb", "cdx.json")),
        *(f"fedsender-V-image.{what}" for what in ("tar.gz", "layers", "cdx.json")),
        "fedsender-V-site.tar.gz",
    }
    with tarfile.open(out / f"fedsender-{tag}-site.tar.gz") as site:
        changelog = site.extractfile("./changelog.html")
        assert changelog is not None
        page = changelog.read()
    assert b"Keep a Changelog" in page
    assert f"fedsender {tag}</title>".encode() in page


def mounts(directory: Path, image: Image) -> tuple[Path, Path]:
    """Empty directories of the image's user: the configuration's, and the volume."""
    etc, state = directory / "etc", directory / "state"
    user, group = map(int, image.config["User"].split(":"))
    for each in (etc, state):
        each.mkdir(mode=0o700)
        os.chown(each, user, group)
    return etc, state


def test_the_image_adds_little_to_its_base_and_has_no_installer(
    buildah: Buildah, image: Image
) -> None:
    base = buildah.bytes_of(f"python:{python_of_the_image()}-slim")
    assert buildah.bytes_of("localhost/fedsender") - base <= MOST_BYTES
    assert not list(image.root.glob("opt/fedsender/**/pip"))
    assert image.config["Healthcheck"]["Test"][:2] == ["CMD", "python"]


def test_a_second_build_of_the_same_sources_gives_the_same_files(
    buildah: Buildah, image: Image
) -> None:
    buildah.build(ROOT, "again")
    first, second = (
        json.loads(buildah("inspect", "--type", "image", name))["OCIv1"]["rootfs"]["diff_ids"]
        for name in ("localhost/fedsender", "localhost/again")
    )
    assert first == second


def test_the_image_has_a_bill_of_materials(image: Image) -> None:
    bill = json.loads((image.root / "opt/fedsender/fedsender.cdx.json").read_text())
    named = {each["name"].lower() for each in bill["components"]}
    assert {"fedsender", "trio", "httpx", "pynacl"} <= named


def test_the_demo_delivers_in_a_container_with_a_read_only_root(
    image: Image, tmp_path: Path
) -> None:
    etc, state = mounts(tmp_path, image)
    done = image.run(etc, state, "sh", "-c", "touch /opt/fedsender/x; id -u; pwd")
    assert (done.stdout, "Read-only file system" in done.stderr) == (
        "991\n/var/lib/fedsender\n",
        True,
    )
    done = image.run(etc, state, "fedsender", "demo", "--json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list(state.iterdir()) == []


@asynccontextmanager
async def daemon(image: Image, etc: Path, state: Path, log: Path) -> AsyncIterator[trio.Process]:
    """The image's own command, running; stopped at the end as an engine does."""
    with log.open("ab") as output:
        async with trio.open_nursery() as nursery:
            running: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    image.command(etc, state),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    check=False,
                )
            )
            try:
                yield running
                running.send_signal(signal.SIGTERM)
                with trio.fail_after(PATIENCE_S):
                    assert await running.wait() == 0
            finally:
                nursery.cancel_scope.cancel()


def health_check(image: Image, etc: Path, state: Path, port: int) -> int:
    """What the image's health check says of a daemon with this admin port."""
    _, *command = image.config["Healthcheck"]["Test"]
    return image.run(etc, state, *(each.replace("9009", str(port)) for each in command)).returncode


async def test_a_newer_image_takes_over_the_volume_and_what_is_owed_in_it(
    image: Image, newer: Image, tmp_path: Path
) -> None:
    """What the older one could not deliver the newer one delivers; there is no way back."""
    etc, state = mounts(tmp_path, image)
    now_ms = real_runtime().now_ms()
    signer = process.write_signing_key(etc, b"k" * 32)
    timeline = new_timeline(ROOM_VERSIONS[ROOM_VERSION], "r", USER)
    about = {"room_version": ROOM_VERSION}
    timeline.append("m.room.create", USER, about, signer=signer, now_ms=now_ms, state_key="")
    event = timeline.append("m.room.message", USER, {}, signer=signer, now_ms=now_ms)
    append, admin = free_port(), free_port()
    receiving = open_receivers(
        1,
        [signer.origin],
        pdu_reader(lambda _room: ROOM_VERSION),
        directory=etc / "tls",
        now_ms=now_ms,
        behaviours={0: failing()},
    )
    log = tmp_path / "log"

    async with receiving as receivers:
        (server,) = receivers.servers.values()
        write_configuration(etc, receivers, append, admin)
        async with daemon(image, etc, state, log):
            async with IntakeClient.at(f"127.0.0.1:{append}", TOKEN) as client:
                with trio.fail_after(PATIENCE_S):
                    await client.append([["servers", [event.room_id, [server.name]]]])
                    row = ["pdu", [event.room_id, event.event_id, event.content, about]]
                    await client.append([row], id=event.event_id)
                    await until(lambda: server.transactions)
            check = partial(health_check, image, etc, state, admin)
            assert await trio.to_thread.run_sync(check) == 0
        assert await trio.to_thread.run_sync(check) == 1
        assert not server.received

        server.become(healthy())
        async with daemon(newer, etc, state, log):
            with trio.fail_after(PATIENCE_S):
                await until(lambda: list(server.received) == [event.event_id])
        assert not receivers.violations.first

        again = partial(image.run, etc, state)
        refused = await trio.to_thread.run_sync(again)
        assert refused.returncode != 0
        assert "this fedsender knows 1: upgrade it" in refused.stderr
        assert "Traceback" not in refused.stderr


def write_configuration(etc: Path, receivers: Receivers, append: int, admin: int) -> None:
    """One beside the certificates, for the image's user; what is written goes to the volume."""
    push = {"listen": f"127.0.0.1:{append}", "token_file": "append.token"}
    values = dict(process.configuration(etc, {"kind": "push", "push": push}, receivers.ca_file))
    values |= {
        "homeserver": {"database": f"{STATE}/homeserver.sqlite3"},
        "sender_database": f"{STATE}/fedsender.sqlite3",
        "ledger": {"directory": f"{STATE}/ledger"},
        "admin": {"listen": f"127.0.0.1:{admin}", "token_file": "admin.token"},
    }
    process.write_secret(etc / "append.token", TOKEN)
    process.write_secret(etc / "admin.token", TOKEN)
    process.write_secret(etc / "config.yaml", yaml.safe_dump(values))
    owner = etc.stat()
    for path in etc.rglob("*"):
        os.chown(path, owner.st_uid, owner.st_gid)
