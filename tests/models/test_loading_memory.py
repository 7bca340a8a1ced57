"""Peak memory while loading a quantized checkpoint is the model and one file, not two copies of the weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, NemotronHConfig

from tests.command_line.command_runs import run_process
from tests.models.checkpoint_edits import set_fields
from tests.models.quantized_kinds import KINDS
from tests.models.quantized_writer import Stored, stored_as, write_files

NUM_SHARDS = 8
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

load_hugging_face(sys.argv[1])  # what is imported and set up once is not the weights'
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
model = load_hugging_face(sys.argv[2]).model
weights = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"grown": status("VmHWM") - before, "weights": weights}))
"""


def write_model(directory: Path, num_mlps: int) -> None:
    """Write a model with many small matrices of random codes."""
    config = NemotronHConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=2048,
        layers_block_type=["linear_attention", "full_attention", *["mlp"] * num_mlps],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=64,
        ssm_state_size=16,
        n_groups=2,
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    config.save_pretrained(directory)
    rng = np.random.default_rng(0)
    stored: dict[str, Stored] = {}
    for name, shape in shapes.items():
        if "mlp" in name or "up_proj" in name or "down_proj" in name:
            stored[name] = Stored("F8_E4M3", rng.integers(0, 127, shape, np.uint8))
            stored[f"{name}_scale_inv"] = stored_as("F32", np.ones([-(-size // 128) for size in shape]))
        else:
            stored[name] = stored_as("BF16", rng.standard_normal(shape, np.float32))
    write_files(directory, stored, NUM_SHARDS)
    set_fields(directory, quantization_config=KINDS["transformers F32"].config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the host's memory")
def test_peak_memory_while_loading_is_the_model_and_one_file(tmp_path: Path) -> None:
    for name, num_mlps in (("small", 1), ("large", 40)):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name, num_mlps)
    finished = run_process("-c", SCRIPT, tmp_path / "small", tmp_path / "large", cwd=tmp_path)
    assert finished.status == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    largest_file = max(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    assert found["weights"] > 80 * 2**20
    assert found["grown"] <= 1.05 * found["weights"] + largest_file
