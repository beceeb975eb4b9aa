"""docs/Containerfile and docs/container.md fit the package, the defaults and each other.

`test_image.py` builds the image and runs it.
"""

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsender.config import Federation, Sending, loads
from fedsender.config.sections import Admin
from fedsender.limits import MIB, of_daemon

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
PAGE = (ROOT / "docs" / "container.md").read_text()


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile in order: name, arguments."""
    text = (ROOT / "docs" / "Containerfile").read_text()
    joined = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in lines]


def of(name: str) -> list[str]:
    return [arguments for each, arguments in instructions() if each == name]


def service() -> Any:
    """The service for compose."""
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["fedsender"]


def test_the_build_has_every_file_that_the_wheel_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {word for each in of("COPY") if "--from" not in each for word in each.split()[:-1]}

    assert all((ROOT / name).exists() for name in copied)
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed <= copied
    for path in (*wheel["packages"], *wheel["force-include"]):
        assert path.split("/")[0] in copied


def test_the_image_has_the_wheel_alone_and_is_not_root() -> None:
    names = [name for name, _ in instructions()]
    last = len(names) - names[::-1].index("FROM")
    copies = [arguments for name, arguments in instructions()[last:] if name == "COPY"]
    assert copies == ["--from=build /opt/fedsender /opt/fedsender"]
    (user,) = of("USER")
    assert user == "991:991"
    assert "user | 991:991" in PAGE


def test_the_versions_of_python_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (argument,) = of("ARG")
    oldest, image = (
        tuple(map(int, text.rpartition("=")[2].split(".")))
        for text in (project["project"]["requires-python"], argument)
    )
    assert image >= oldest
    # The tests run on it.
    assert f"sys.version_info < {image}" in (ROOT / ".ci" / "run").read_text()


def test_without_arguments_it_runs_the_installed_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (entrypoint,), (arguments,) = of("ENTRYPOINT"), of("CMD")
    (command,) = json.loads(entrypoint)
    assert command in project["project"]["scripts"]
    assert f"`{' '.join(json.loads(arguments))}`" in PAGE


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server on loopback that answers /health so, and anything else with 404; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def health_check(port: int) -> int:
    """Run the image's health check against this port; its exit code."""
    (line,) = of("HEALTHCHECK")
    python, *arguments = json.loads(line.split(" CMD ", 1)[1])
    assert python == "python"
    listen = str(Admin().listen)
    address, default = listen.split(":")
    assert f"'{address}', {default}," in arguments[-1]
    script = arguments[-1].replace(default, str(port))
    proxied = {"http_proxy": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, *arguments[:-1], script], env=proxied, capture_output=True, check=False
    )
    return done.returncode


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_asks_the_daemon(status: int, code: int) -> None:
    with answering(status) as port:
        assert health_check(port) == code


def test_the_health_check_fails_where_nothing_listens() -> None:
    with answering(200) as port:
        pass
    assert health_check(port) == 1


def test_the_service_has_time_and_memory_for_the_defaults() -> None:
    grace_s = int(service()["stop_grace_period"].removesuffix("s"))
    memory_mib = 1024 * int(service()["mem_limit"].removesuffix("g"))
    assert grace_s >= Sending().drain + 40
    assert memory_mib >= of_daemon(Federation(), Sending()).bytes // MIB


def test_the_service_writes_to_its_own_volume_alone() -> None:
    mounts = [each.split(":") for each in service()["volumes"]]
    assert service()["read_only"] is True
    assert [path for _, path, *mode in mounts if mode != ["ro"]] == of("WORKDIR")[-1:]
    (arguments,) = of("CMD")
    directory = str(Path(json.loads(arguments)[-1]).parent)
    assert directory in [path for _, path, *mode in mounts if mode == ["ro"]]


def test_the_configuration_for_kubernetes_is_the_same_for_all_pods(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    (block,) = re.findall(r"It has\n#\n((?:#   .*\n)+)", text)
    shown = re.sub(r"^#   ", "", block, flags=re.M)
    _, stateful_set = yaml.safe_load_all(text)
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        value = variable.get("value", "a secret of some length")
        pod = f"{stateful_set['metadata']['name']}-0"
        monkeypatch.setenv(variable["name"], value.replace("$(POD_NAME)", pod))
    loaded = loads(shown, directory=tmp_path)
    assert loaded.feed.http.instances.keys() == {"master"}
    assert loaded.metrics.listen is not None
    assert str(loaded.metrics.listen).endswith(f":{container['ports'][0]['containerPort']}")
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert {str(loaded.ledger.directory.parent), str(loaded.signing_key.parent)} <= mounts

    # The chart makes the list of Synapse's senders of the number of its own, which must not run.
    values = yaml.safe_load((DEPLOY / "ess-helm.yaml").read_text())
    worker = values["synapse"]["workers"]["federation-sender"]
    senders = tuple(f"ess-synapse-fed-sender-{n}" for n in range(worker["replicas"]))
    assert worker["enabled"]
    assert int(worker["resources"]["requests"]["cpu"]) > 10_000
    assert senders == loaded.homeserver.federation_sender_instances
    assert loaded.instance_name == senders[0]
    assert stateful_set["spec"]["replicas"] == len(senders)


def test_the_playbook_stops_the_worker_before_ours_starts_and_knows_each_name() -> None:
    """Two senders of one name send everything twice; also after a run of the other playbook."""
    text = (DEPLOY / "ansible.yml").read_text()
    (play,) = yaml.safe_load(text)
    blocks = {task["when"]: task["block"] for task in play["tasks"] if "block" in task}
    tasks = [task for task in play["tasks"] if "block" not in task]
    tasks += [task for block in blocks.values() for task in block]
    known = {*play["vars"], *(task["register"] for task in tasks if "register" in task)}
    known |= {name for task in tasks for name in task.get("ansible.builtin.set_fact", ())}
    assert {*re.findall(r"\bfedsender_\w+", text)} == known

    def services(state: str) -> list[tuple[str, str]]:
        done = [task.get("ansible.builtin.systemd_service") for task in blocks[state]]
        return [(each["name"], each["state"]) for each in done if each is not None]

    worker = "{{ fedsender_worker }}.service"
    (first, stopped), (second, _) = services('fedsender_state == "present"')
    assert (first, stopped, second) == (worker, "stopped", "fedsender.service")
    back = [("fedsender.service", "stopped"), (worker, "started")]
    assert services('fedsender_state == "absent"') == back
    (condition,) = (
        copied["content"]
        for task in tasks
        if (copied := task.get("ansible.builtin.copy", {})).get("dest")
        == "{{ fedsender_interlock }}"
    )
    assert condition == "[Unit]\nConditionPathExists=!{{ fedsender_unit }}\n"
