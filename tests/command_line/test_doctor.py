"""The doctor command."""

import json
import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_mamba_cache import installation
from megatron_mamba_cache.command_line import doctor
from megatron_mamba_cache.command_line.doctor import KERNELS, KernelChoice
from megatron_mamba_cache.command_line.main import main
from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.kernels.attention import choice, flashinfer_compiler
from tests.command_line.command_runs import needs_installation, run_process
from tests.models.published_configs import QWEN


@needs_installation
def test_doctor_names_device_versions_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for start in ("device ", "python ", "torch ", "triton ", "megatron-core      0.16.1", "this package       ready"):
        assert any(line.startswith(start) for line in lines)
    for start in (
        "cache memory       --cache-gb G gives" if not torch.cuda.is_available() else "cache memory ",
        "tiers              ",
        "compiled kernels   Triton compiles each",
        "safetensors ",
        "tokenizers ",
        "default model ",
        "  server             present: serve",
        "  hf                 present: ",
        "  test               present: ",
    ):
        assert any(line.startswith(start) for line in lines)
    for kernel in KERNELS:
        assert any(line.startswith(f"  {kernel.operation} ") and kernel.reason in line for line in lines)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.operation)
def test_doctor_names_the_kernels_that_layers_use(kernel: KernelChoice) -> None:
    layer = import_module(f"megatron_mamba_cache.{kernel.module}")
    assert all(hasattr(layer, function) for function in kernel.functions)


def test_doctor_explains_the_choice_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = {"first": "it is new", "second": None, "last": None}
    monkeypatch.setattr(choice, "refusals_for_usual_model", lambda: refusals)
    expected = {"first": "no: it is new", "second": "in use", "last": "could be used"}
    assert list(doctor._attention_backends()) == [f"  {name:<16} {what}" for name, what in expected.items()]


NVCC, TOOLS = "CUDA/bin/nvcc", ["PATH/c++", "SCRIPTS/ninja"]


@pytest.mark.parametrize(
    ("files", "is_compiled", "expected"),
    [
        ([], False, f"its kernels cannot be compiled without {NVCC}, c++, ninja; install it, or run `flashinfer"),
        ([NVCC, "SCRIPTS/ninja"], False, "its kernels cannot be compiled without c++; install it"),
        (
            [NVCC, *TOOLS],
            False,
            f"{NVCC} compiles its kernels when a model is first started; they are cached in HOME/.",
        ),
        (["PATH/nvcc", *TOOLS], False, "PATH/nvcc compiles its kernels when a model is first started"),
        ([], True, "its kernels are in the package flashinfer-jit-cache"),
    ],
)
def test_doctor_reports_the_source_of_flashinfers_kernels(
    files: list[str], is_compiled: bool, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in files:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    for name in ("CUDA_PATH", "CUDA_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    if "PATH/nvcc" not in files:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "CUDA"))
    monkeypatch.setenv("PATH", str(tmp_path / "PATH"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "HOME"))
    monkeypatch.setattr(flashinfer_compiler.sysconfig, "get_path", lambda name: str(tmp_path / name.upper()))
    monkeypatch.setattr(flashinfer_compiler, "is_installed", lambda package: is_compiled)
    monkeypatch.setattr(choice, "refusals_for_usual_model", lambda: {"flashinfer": None, "reference": None})
    (first, _) = (line.replace(f"{tmp_path}/", "") for line in doctor._attention_backends())
    assert first.startswith("  flashinfer       in use, ") and f"; {expected}" in first
    assert os.environ["PATH"] == str(tmp_path / "PATH")


def test_doctor_reports_a_foreign_apex_and_an_unused_package(tmp_path: Path) -> None:
    for package in ("apex", "causal_conv1d"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    finished = run_process("-m", "megatron_mamba_cache", "doctor", cwd=tmp_path, import_first=tmp_path)
    assert finished.status == 0
    assert "apex               installed, but not NVIDIA's" in finished.stdout
    assert "causal_conv1d      installed, not used: the convolution runs this package's kernels" in finished.stdout
    if find_spec("mamba_ssm") is None:
        assert "mamba_ssm          not installed" in finished.stdout


def test_doctor_accepts_nvidias_apex_and_survives_a_broken_torch(tmp_path: Path) -> None:
    (tmp_path / "apex" / "normalization").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    (tmp_path / "apex" / "normalization" / "__init__.py").write_text("class FusedRMSNorm: ...\n")
    (tmp_path / "torch.py").write_text("raise OSError('libcudart is missing')\n")
    finished = run_process("-m", "megatron_mamba_cache", "doctor", cwd=tmp_path, import_first=tmp_path)
    assert finished.status == 1
    assert "apex               installed, not used: norms are torch's" in finished.stdout
    assert "torch cannot be imported (OSError: libcudart is missing)" in finished.stdout
    assert "this package       cannot be used: OSError: libcudart is missing" in finished.stdout


def _lose(monkeypatch: pytest.MonkeyPatch, lost: str, found: str | None) -> None:
    """Make a distribution appear to be missing, or to have the version `found`."""

    def version(name: str) -> str:
        if name == lost and found is None:
            raise PackageNotFoundError(name)
        return found if name == lost and found is not None else installed_version(name)

    monkeypatch.setattr(installation, "version", version)


@needs_installation
@pytest.mark.parametrize(
    ("lost", "found", "reported"),
    [
        ("tqdm", None, "it requires tqdm"),
        ("megatron-core", "0.16.0", "it requires megatron-core==0.16.1 (found 0.16.0)"),
    ],
)
def test_doctor_fails_if_the_base_install_is_incomplete(
    lost: str, found: str | None, reported: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _lose(monkeypatch, lost, found)
    assert main(["doctor"]) == 1
    assert f"this package       cannot be used: {reported}\n" in capsys.readouterr().out


@needs_installation
def test_doctor_reports_a_missing_extra_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _lose(monkeypatch, "pyzmq", None)
    assert main(["doctor"]) == 0
    reported = "missing pyzmq; for serve, and replicas with a coordinator: pip install 'megatron-mamba-cache[server]'"
    output = capsys.readouterr().out
    assert f"  server             {reported}\n" in output and "  hf                 present: " in output


@needs_installation
def test_serve_without_its_extra_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _lose(monkeypatch, "fastapi", None)
    assert main(["serve"]) == 2
    reported = "serve needs fastapi, which is not installed; run pip install 'megatron-mamba-cache[server]'"
    assert capsys.readouterr().err == f"mamba-cache: error: {reported}\n"


@pytest.mark.parametrize("flag", ["--model", "--hf-model"])
def test_doctor_reports_what_a_model_needs(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", flag, str(SHIPPED_MODEL)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("model  "))
    assert f"{SHIPPED_MODEL}: layers M-M*-M-M*-M-M*-, 4,096 positions, recurrence's chunk of 64 tokens; " in line


def test_doctor_reads_only_the_configuration_of_a_larger_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN["Qwen3.6-27B"]))
    assert main(["doctor", "--hf-model", str(tmp_path)]) == 0
    reported = capsys.readouterr().out
    assert f"{tmp_path}: layers {'M-M-M-*-' * 16}, 262,144 positions, " in reported
    assert "chunk of 64 tokens; 65,536 bytes of KV a token and 153,944,064 bytes a state" in reported


def test_doctor_fails_for_an_unsupported_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    assert "\nmodel              cannot be used: ValueError: " in capsys.readouterr().out
