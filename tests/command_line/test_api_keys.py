"""API keys of flags and files, and their names in logs."""

from pathlib import Path

import pytest

from megatron_mamba_cache.command_line.arguments import command_parser
from megatron_mamba_cache.command_line.flag_sources import UsageError
from megatron_mamba_cache.command_line.server_arguments import api_keys_of
from megatron_mamba_cache.server.tenants import ApiKeys


def keys_of(*flags: str) -> ApiKeys:
    return api_keys_of(command_parser().parse_args(["serve", *flags]))


def name_of(keys: ApiKeys, key: str) -> str:
    owner = keys.owner_of(f"Bearer {key}")
    assert owner is not None, key
    return keys.name_of(owner)


def test_key_file_lines_hold_a_key_or_a_name_and_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann: sk-1\n\n  bob-2.x:   sk:2=  \nsk-3==\nsk:4\nname=sk5\n")
    keys = keys_of("--api-key-file", str(file), "--api-key", "sk-0")
    assert [name_of(keys, key) for key in ("sk-1", "sk:2=")] == ["ann", "bob-2.x"]
    plain = [name_of(keys, key) for key in ("sk-0", "sk-3==", "sk:4", "name=sk5")]
    assert len(set(plain)) == 4 and all(name.startswith("key-") and len(name) == 12 for name in plain)
    assert keys.owner_of("Bearer ann: sk-1") is None
    assert name_of(keys_of("--api-key", "sk-0"), "sk-0") == plain[0]  # the same in every run


def test_admin_keys_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "admins"
    file.write_text("boss: sk-boss\n")
    keys = keys_of("--api-key", "sk-user", "--admin-api-key-file", str(file), "--admin-api-key", "sk-other")
    may = {
        key: keys.may_administrate(keys.owner_of(f"Bearer {key}") or "") for key in ("sk-user", "sk-boss", "sk-other")
    }
    assert may == {"sk-user": False, "sk-boss": True, "sk-other": True}
    assert name_of(keys, "sk-boss") == "boss"


@pytest.mark.parametrize("flag", ["--api-key-file", "--admin-api-key-file"])
def test_error_for_an_unusable_key_file_names_file_and_flag(flag: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    for path in (empty, tmp_path / "missing"):
        with pytest.raises(UsageError, match=rf"^{flag} .*{path.name}"):
            keys_of("--api-key", "sk-0", flag, str(path))


def test_admin_keys_without_api_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "admins"
    file.write_text("sk-boss\n")
    with pytest.raises(UsageError, match="no API key"):
        keys_of("--admin-api-key-file", str(file))
