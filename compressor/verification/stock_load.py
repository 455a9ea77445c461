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
            import fla  # type: ignore[import-untyped]  # noqa: F401
    result = _load(arguments.folder, arguments.device, arguments.generate)
    result["imported_compressor"] = any(name.split(".")[0] == "compressor" for name in sys.modules)
    print(json.dumps(result))


def _load(folder: str, device: str, generate: bool) -> dict[str, Any]:
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    problems = _problems(info)
    named = (transformers.AutoConfig.from_pretrained(folder).architectures or [""])[0]
    if named != type(model).__name__ and named in dir(transformers):
        stock_class = getattr(transformers, named)
        _, info = stock_class.from_pretrained(folder, dtype="auto", local_files_only=True, output_loading_info=True)
        problems += _problems(info)
    generated = _generate(model.to(device), folder, device) if generate else None
    return {"class": type(model).__name__, "problems": problems, "generated_tokens": generated}


def _problems(info: dict[str, Any]) -> list[str]:
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    return [f"{kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[:3]}" for kind in kinds if info.get(kind)]


def _generate(model: Any, folder: str, device: str) -> int:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompt = tokenizer("The memory of a recurrent model is", return_tensors="pt", return_token_type_ids=False).to(device)
    output = model.eval().generate(**prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return int(output.shape[1] - prompt["input_ids"].shape[1])


if __name__ == "__main__":
    main()
