"""Describe the GPU, CPU and library versions of a measurement."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def describe_machine() -> str:
    """Return the description as one line of Markdown."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"Machine: {card}; {_processor()}; Python {platform.python_version()}; {', '.join(_versions())}."


def _versions() -> list[str]:
    found = []
    for name in ("torch", "triton", "megatron-core"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    print(describe_machine())
