"""Scripts that use third-party clients, and the environments that the scripts run in.

Each environment has the newest releases of the packages in an extra of pyproject.toml. Environments are cached in the
folder CLIENTS_HOME (default: ~/.cache/megatron_mamba_cache/clients); remove the folder to get newer releases. The Node
clients share the environment of clients/package.json. To add a client, add a script to clients/, its line in `CLIENTS`,
and an extra client-... in pyproject.toml or a dependency in package.json.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).with_name("clients")
NODE = "node"
_REPOSITORY = Path(__file__).parents[2]
_HOME = Path(os.environ.get("CLIENTS_HOME") or Path.home() / ".cache/megatron_mamba_cache/clients")
_MADE_OF = "made_of.txt"
_VERSIONS = (
    "from importlib.metadata import version; import sys; print(*(f'{n} {version(n)}' for n in sys.argv[1:]), sep=', ')"
)


@dataclass(frozen=True, slots=True)
class Client:
    """Script of a client and the environment that it runs in.

    Args:
        environment: Name of an extra, `NODE`, or "" for the Python that runs the tests.
        is_scripted: True if the script needs a server from `scripted_model_server`.
        module: Module that the script needs; the script is skipped if it is missing.
    """

    environment: str
    is_scripted: bool = False
    module: str = ""


CLIENTS: Mapping[str, Client] = {
    "with_openai.py": Client("client-openai"),
    "with_openai_agents.py": Client("client-openai"),
    "with_openai_turns.py": Client("client-openai", is_scripted=True),
    "with_openai.mjs": Client(NODE),
    "with_openai_turns.mjs": Client(NODE, is_scripted=True),
    "with_ai_sdk.mjs": Client(NODE, is_scripted=True),
    "with_codex_bodies.py": Client("", is_scripted=True),
    "with_anthropic.py": Client("client-anthropic"),
    "with_anthropic_turns.py": Client("client-anthropic", is_scripted=True),
    "with_langchain_openai.py": Client("client-langchain"),
    "with_langchain_agents.py": Client("client-langchain"),
    "with_langchain_turns.py": Client("client-langchain", is_scripted=True),
    "with_agents_sdk.py": Client("client-openai-agents", is_scripted=True),
    "with_pydantic_ai.py": Client("client-pydantic-ai", is_scripted=True),
    "with_instructor.py": Client("client-instructor"),
    "with_instructor_turns.py": Client("client-instructor", is_scripted=True),
    "with_litellm.py": Client("client-litellm"),
    "with_litellm_turns.py": Client("client-litellm", is_scripted=True),
    "with_aider.py": Client("client-aider", is_scripted=True),
    "with_lm_eval.py": Client("client-lm-eval"),
    "with_llm.py": Client("client-llm"),
    "with_guidellm.py": Client("", module="guidellm"),  # needs torch, so it runs in the tests' environment
}


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment in which client scripts run.

    Args:
        command: Command that runs a script.
        folder: Folder with the scripts.
        versions: Names and releases of the clients.
    """

    command: str
    folder: Path
    versions: str


class NotHere(Exception):
    """The environment is not available on this machine."""


def environment_of(client: Client) -> Environment:
    """Return a client's environment; build it if it is missing or its requirements have changed.

    Raises:
        NotHere: If Node, or the client's module, is not installed.
        subprocess.CalledProcessError: If an installation fails.
    """
    if client.environment == NODE:
        return _node_environment()
    if client.environment:
        return _python_environment(client.environment)
    python = sys.executable
    if client.module and subprocess.run([python, "-c", f"import {client.module}"], capture_output=True).returncode:
        raise NotHere(f"{client.module} is not installed; pip install {client.module}")
    return Environment(python, SCRIPTS, _python_versions(python, [client.module or "pip"]))


def _python_environment(extra: str) -> Environment:
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"][extra]
    folder = _HOME / extra
    python = str(folder / "bin" / "python")
    if _is_stale(folder, "\n".join(requirements)):
        venv.create(folder, with_pip=True)
        _run([python, "-m", "pip", "install", "--quiet", *requirements])
        _mark(folder, "\n".join(requirements))
    names = [requirement.split("[")[0].split(">")[0] for requirement in requirements]
    return Environment(python, SCRIPTS, _python_versions(python, names))


def _node_environment() -> Environment:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise NotHere("node or npm is not installed")
    package = (SCRIPTS / "package.json").read_text()
    folder = _HOME / NODE
    if _is_stale(folder, package):
        folder.mkdir(parents=True)
        shutil.copy(SCRIPTS / "package.json", folder)
        _run([npm, "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder)])
        _mark(folder, package)
    for script in SCRIPTS.glob("*.mjs"):  # Node resolves imports relative to the importing file
        shutil.copy(script, folder)
    installed = {name: folder / "node_modules" / name / "package.json" for name in json.loads(package)["dependencies"]}
    versions = [f"{name} {json.loads(file.read_text())['version']}" for name, file in installed.items()]
    return Environment(node, folder, ", ".join(versions))


def _is_stale(folder: Path, made_of: str) -> bool:
    """Return True if an environment must be built; remove an outdated environment."""
    file = folder / _MADE_OF
    if file.exists() and file.read_text() == made_of:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def _mark(folder: Path, made_of: str) -> None:
    (folder / _MADE_OF).write_text(made_of)


def _python_versions(python: str, names: list[str]) -> str:
    return _run([python, "-c", _VERSIONS, *names]).stdout.strip()


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done
