"""Static checks of the Dockerfile and the Kubernetes manifest."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import REPOSITORY
from tests.docs.command_lines import parsed

DEPLOY = REPOSITORY / "deploy"
INSTRUCTIONS = re.compile("ARG|CMD|COPY|ENTRYPOINT|ENV|EXPOSE|FROM|HEALTHCHECK|RUN|STOPSIGNAL|USER|VOLUME|WORKDIR")


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and their arguments."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def argument(name: str) -> str:
    """Return the argument of the last such instruction."""
    return [value for instruction, value in instructions() if instruction == name][-1]


def manifests() -> dict[str, dict[str, Any]]:
    """Return the manifest's documents by kind."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents}


def pod() -> dict[str, Any]:
    """Return the specification of the deployment's pod."""
    spec: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    """Return its only container."""
    (only,) = pod()["containers"]
    found: dict[str, Any] = only
    return found


def test_dockerfile_copies_existing_files_with_known_instructions() -> None:
    assert all(INSTRUCTIONS.fullmatch(name) for name, _ in instructions())
    assert instructions()[0][0] == "FROM"
    copied = [path for name, value in instructions() if name == "COPY" for path in value.split()[:-1]]
    assert copied and all((REPOSITORY / path).exists() for path in copied)
    for name, value in instructions():
        if name == "RUN":
            assert shlex.split(value)


def test_dockerfile_copies_every_file_of_the_build() -> None:
    copied = {path for name, value in instructions() if name == "COPY" for path in value.split()[:-1]}
    assert {"pyproject.toml", "setup.py", "README.md", "megatron_mamba_cache"} <= copied


def test_image_installs_the_gpu_packages_in_the_readme() -> None:
    (extras,) = re.findall(r"pip install -e '\.(\[.*gpu.*\])'", (REPOSITORY / "README.md").read_text())
    commands = [value for name, value in instructions() if name == "RUN"]
    assert f"pip install --no-cache-dir '.{extras}'" in commands


@pytest.mark.parametrize(("index", "status"), [("https://index", 0), ("https://broken", 1), ("", 0)])
def test_image_has_flashinfer_kernels_for_its_flashinfer_release(index: str, status: int, tmp_path: Path) -> None:
    (command,) = [value for name, value in instructions() if name == "RUN" and "flashinfer" in value]
    for program, script in {
        "python": "echo 0.6.18.post1",
        "pip": f'echo "$@" >> {tmp_path}/asked; [ "${{!#}}" != https://broken ]',
    }.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / program).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FLASHINFER_INDEX": index}
    finished = subprocess.run(["/bin/sh", "-c", command], env=environment, check=False)
    assert finished.returncode == status
    asked = (tmp_path / "asked").read_text() if index else ""
    expected = f"install --no-cache-dir --no-deps flashinfer-jit-cache==0.6.18.post1 --index-url {index}\n"
    assert asked == (expected if index else "")


def test_image_runs_the_server_as_an_unprivileged_user() -> None:
    assert argument("USER") not in ("0", "root")
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("COPY", "RUN"))
    assert json.loads(argument("ENTRYPOINT")) == ["mamba-cache"]
    serve = parsed(json.loads(argument("CMD")))
    assert (serve.command, serve.host, str(serve.port)) == ("serve", "0.0.0.0", argument("EXPOSE"))
    probe = json.loads(argument("HEALTHCHECK").partition("CMD ")[2])
    compile(probe[2], "HEALTHCHECK", "exec")
    assert f":{serve.port}/health" in probe[2]


def test_kubernetes_pod_uses_only_existing_server_flags() -> None:
    serve = parsed(container()["args"])
    assert serve.command == "serve" and serve.host == "0.0.0.0"
    (port,) = container()["ports"]
    assert port["containerPort"] == serve.port
    service = manifests()["Service"]["spec"]
    assert service["ports"][0]["targetPort"] == port["name"]
    assert service["selector"] == manifests()["Deployment"]["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_kubernetes_probes_request_the_health_endpoint(probe: str) -> None:
    assert container()[probe]["httpGet"] == {"path": "/health", "port": "http"}


def test_grace_period_exceeds_pre_stop_hook_and_drain() -> None:
    startup = container()["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1200
    program, seconds = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep" and int(seconds) >= container()["readinessProbe"]["periodSeconds"]
    drain = parsed(container()["args"]).drain_seconds
    assert pod()["terminationGracePeriodSeconds"] >= int(seconds) + drain + 10
    liveness = container()["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > drain


def test_pod_runs_as_non_root_with_a_gpu_and_shared_memory() -> None:
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert str(pod()["securityContext"]["runAsUser"]) == argument("USER")
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == 1
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container()["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_kubernetes_caches_and_keys_are_on_volumes() -> None:
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container()["volumeMounts"]}
    environment = {entry["name"]: entry["value"] for entry in container()["env"]}
    folders = ("HF_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
    assert all(environment[name].split("/")[1] == "cache" for name in folders)
    assert {f"{name}={environment[name]}" for name in folders} <= set(argument("ENV").split())
    claim = mounts["/cache"]["persistentVolumeClaim"]["claimName"]
    assert manifests()["PersistentVolumeClaim"]["metadata"]["name"] == claim
    folder, _, _ = parsed(container()["args"]).api_key_file.rpartition("/")
    assert mounts[folder]["secret"]["secretName"] == "mamba-cache-keys"
    assert argument("VOLUME") == "/cache"
