"""Flags for access to the coordinator, and errors that `serve` reports before it loads a model."""

from pathlib import Path

import pytest

from megatron_mamba_cache.command_line.arguments import command_parser
from megatron_mamba_cache.command_line.flag_sources import UsageError
from megatron_mamba_cache.command_line.launch import Launch
from megatron_mamba_cache.command_line.main import EXIT_USAGE, main
from megatron_mamba_cache.command_line.server_arguments import routing_settings
from megatron_mamba_cache.replicas.access import InsecureAccess, KeyedAccess, LoopbackAccess
from megatron_mamba_cache.replicas.settings import RoutingSettings

ONE_HOST = Launch(0, 8, 0, 8)
TWO_HOSTS = Launch(0, 8, 0, 4)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "coordinator.key"
    file.write_text("0123456789abcdef" * 4, encoding="ascii")
    file.chmod(0o600)
    return file


def settings_of(launch: Launch, *flags: str) -> RoutingSettings:
    return routing_settings(command_parser().parse_args(["serve", *flags]), launch)


@pytest.mark.parametrize("launch", [Launch(), ONE_HOST, Launch(0, 8)])
def test_coordinator_on_one_host_listens_on_loopback_by_default(launch: Launch) -> None:
    settings = settings_of(launch)
    assert settings == RoutingSettings() and isinstance(settings.access(), LoopbackAccess)


@pytest.mark.parametrize("launch", [ONE_HOST, TWO_HOSTS])
def test_key_file_protects_all_sockets(launch: Launch, key_file: Path) -> None:
    settings = settings_of(launch, "--coordinator-key-file", str(key_file))
    access = settings.access()
    assert isinstance(access, KeyedAccess)
    assert access.fingerprint == KeyedAccess(bytes.fromhex(key_file.read_text())).fingerprint


@pytest.mark.parametrize("launch", [ONE_HOST, TWO_HOSTS])
def test_coordinator_accepts_other_hosts_only_with_an_explicit_flag(launch: Launch) -> None:
    assert isinstance(settings_of(launch, "--insecure-coordinator").access(), InsecureAccess)


def test_several_hosts_without_an_access_flag_are_refused() -> None:
    with pytest.raises(UsageError) as refused:
        settings_of(TWO_HOSTS)
    assert str(refused.value) == (
        "8 processes on several hosts need --coordinator-key-file FILE with the same key on each (create it with: "
        "(umask 077; openssl rand -hex 32 > FILE)), or --insecure-coordinator on a trusted network"
    )


def test_torchrun_sets_the_number_of_local_processes() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    launch = Launch.of_environment(environment)
    assert launch == Launch(5, 8, 1, 4) and launch.is_on_several_machines
    assert not Launch.of_environment({**environment, "LOCAL_WORLD_SIZE": "8"}).is_on_several_machines
    del environment["LOCAL_WORLD_SIZE"]  # as older launchers; ranks compare their hosts as they start
    assert not Launch.of_environment(environment).is_on_several_machines
    with pytest.raises(UsageError, match="LOCAL_WORLD_SIZE=x"):
        Launch.of_environment({**environment, "LOCAL_WORLD_SIZE": "x"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "2 processes on several hosts need --coordinator-key-file FILE"),
        (("--coordinator-key-file", "no-file"), "--coordinator-key-file: cannot read key file no-file: No such file"),
        (("--coordinator-key-file", "a", "--insecure-coordinator"), "not allowed with argument --coordinator-key-file"),
        (("--coordinator-key-file",), "--coordinator-key-file: expected one argument"),
    ],
)
def test_serve_prints_a_one_line_error_before_loading_a_model(
    flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert main(["serve", "--random-model", "--port", "0", *flags]) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_key_file_readable_by_others_is_refused(key_file: Path) -> None:
    key_file.chmod(0o644)
    for launch in (Launch(), ONE_HOST, TWO_HOSTS):
        with pytest.raises(UsageError, match=r"--coordinator-key-file: key file .* \(mode 644\); run chmod 600"):
            settings_of(launch, "--coordinator-key-file", str(key_file))


def test_generate_has_no_coordinator_flag() -> None:
    with pytest.raises(UsageError, match="--insecure-coordinator"):
        command_parser().parse_args(["generate", "--insecure-coordinator"])
