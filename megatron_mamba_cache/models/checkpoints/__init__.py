"""Reading and writing checkpoints: Hugging Face directories and Megatron distributed checkpoints."""
