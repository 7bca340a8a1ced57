"""Package metadata of megatron-mamba-cache."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"

# Connections are uvicorn's, with other rules: 0.54 is the oldest that they were tried with.
# fastapi-offline has the files of Swagger UI, so that /docs needs no other host.
SERVER = ["fastapi", "fastapi-offline", "uvicorn>=0.54,<1", "h11", "prometheus-client", "pyzmq", "msgpack"]

setup(
    name="megatron-mamba-cache",
    version="0.1.0",
    description="Prefix caching for hybrid Mamba2 + attention models on Megatron's dynamic inference",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_mamba_cache", "megatron_mamba_cache.*"]),
    package_data={
        "megatron_mamba_cache": ["py.typed", "command_line/*.txt", "models/small_python_model/*", "server/*.html"]
    },
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11,<2.14",
        # The context overrides methods of this very release; another one must be tried before it is allowed.
        "megatron-core==0.16.1",
        "triton>=3.6; platform_system == 'Linux'",
        "einops",
        "numpy",
        "packaging",
        # megatron-core's checkpoint writer measures its memory with it.
        "psutil",
        "safetensors",
        "tokenizers",
        "tqdm",
    ],
    extras_require={
        # Loaded checkpoints are compared with transformers; before 5.23 it did not norm Bamba's and Granite's by group.
        "test": [
            "pytest>=8",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "transformers>=5.23,<6",
            *SERVER,
            "openai",
            "httpx",
            "schemathesis>=4,<5",
        ],
        "server": SERVER,
        "hf": ["transformers>=5", "huggingface_hub"],
    },
)
