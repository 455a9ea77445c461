"""Child process: load a checkpoint as a user would, without this package.

Run by path, not as a module, so that nothing of `compressor` is imported; the last line printed is
JSON. With `--hide-fla` fla cannot be imported, which is how transformers runs its own families on a
machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from typing import Any

NEW_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--device", required=True)
    parser.add_argument("--import-fla", action="store_true")
    parser.add_argument("--hide-fla", action="store_true")
    parser.add_argument("--generate", action="store_true")
    arguments = parser.parse_args()
    if arguments.hide_fla:
        sys.modules["fla"] = None  # type: ignore[assignment]
    if arguments.import_fla:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
            import fla  # noqa: F401
        if arguments.device == "cpu":
            _stand_in_for_flash_attention()
    result = _load(arguments.folder, arguments.device, arguments.generate)
    result["imported_compressor"] = any(name.split(".")[0] == "compressor" for name in sys.modules)
    print(json.dumps(result))


def _stand_in_for_flash_attention() -> None:
    """fla does not even build its softmax layers without flash-attn, which needs a GPU; loading them needs none."""
    import fla.layers.attn

    if fla.layers.attn.flash_attn_func is None:
        fla.layers.attn.flash_attn_func = print


def _load(folder: str, device: str, generate: bool) -> dict[str, Any]:
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    model, info = loaded
    problems = _problems(info)
    named = (transformers.AutoConfig.from_pretrained(folder).architectures or [""])[0]
    if named != type(model).__name__ and named in dir(transformers):
        stock_class = getattr(transformers, named)
        _, info = stock_class.from_pretrained(folder, dtype="auto", local_files_only=True, output_loading_info=True)
        problems += _problems(info)
    facts = _generate(model.to(device), folder, device) if generate else {}
    softmax = any(type(module).__module__ == "fla.layers.attn" for module in model.modules())
    return {"class": type(model).__name__, "problems": problems, "fla_softmax_layers": softmax, **facts}


def _problems(info: dict[str, Any]) -> list[str]:
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    return [f"{kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[:3]}" for kind in kinds if info.get(kind)]


def _generate(model: Any, folder: str, device: str) -> dict[str, Any]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompt = tokenizer("The memory of a recurrent model is", return_tensors="pt", return_token_type_ids=False)
    return generation_facts(model.eval(), prompt["input_ids"][0].to(device))


def generation_facts(model: Any, prompt: Any) -> dict[str, Any]:
    """Greedy generation with the cache, held against one full forward pass over what it gave.

    `prompt` is int64 [T]. `generation_error` is ||a - b|| / ||b|| of the logits of all steps: rounding
    where the state is carried from token to token, much more where it is lost.
    """
    import torch

    generated = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        whole = model(input_ids=generated.sequences, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    steps = torch.cat(generated.logits).double()
    return {"generated_tokens": len(steps), "generation_error": float((steps - whole).norm() / whole.norm())}


if __name__ == "__main__":
    main()
