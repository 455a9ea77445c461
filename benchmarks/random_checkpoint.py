"""A checkpoint of random weights, shaped as Qwen3.5, of any size: for what depends on shapes alone.

    python -m benchmarks.random_checkpoint FOLDER --layers 32

With the defaults it has 4.2 billion parameters in bfloat16, 8.4 GB. It is written shard by shard and never in memory as
a whole; its tokenizer is the bundled model's, whose tokens are the first of its vocabulary.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from benchmarks.options import check_options
from benchmarks.output_files import told_in_one_sentence
from compressor.checkpoint.validation import meta_model
from compressor.demo import demo_model_path
from compressor.errors import RequestError
from compressor.export.disk import refuse_too_little_space
from compressor.export.weights import OutputTensor, write_weights

DTYPE = torch.bfloat16
SHARD_BYTES = 2_000_000_000


@told_in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=2560)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    check_options(arguments)
    size = make_checkpoint(arguments.folder, arguments.layers, arguments.hidden_size, arguments.seed)
    print(f"{arguments.folder}: {size:,} bytes")


def make_checkpoint(folder: Path, layers: int, hidden_size: int, seed: int) -> int:
    """Write the checkpoint into `folder`, which must not exist; bytes of its weights.

    Raises:
        RequestError: the folder exists or cannot be made, or too little space.
    """
    config = Qwen3_5TextConfig(
        vocab_size=248_320,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        intermediate_size=hidden_size * 18 // 5,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
        architectures=["Qwen3_5ForCausalLM"],
        dtype="bfloat16",
    )
    shapes = {name: tuple(value.shape) for name, value in meta_model(config, Qwen3_5ForCausalLM).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        OutputTensor(name, DTYPE, shape, lambda name=name, shape=shape: _drawn(name, shape, generator))  # type: ignore[misc]
        for name, shape in shapes.items()
    ]
    refuse_too_little_space(folder, sum(tensor.num_bytes for tensor in tensors))
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise RequestError(f"{folder} cannot be made ({error.strerror}); name a folder that does not exist.") from error
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (demo_model_path() / file).exists():
            shutil.copyfile(demo_model_path() / file, folder / file)
    return write_weights(tensors, folder, SHARD_BYTES, None).total_size


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Matrices keep the scale of what they read; vectors are near the values that stock initialisation gives them."""
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
    offset = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
    return torch.empty(shape, dtype=DTYPE).normal_(offset, scale, generator=generator)


if __name__ == "__main__":
    main()
