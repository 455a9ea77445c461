"""Child process: load the given folders as a user would, in one process without this package.

Where mamba_ssm is not installed transformers runs its own plain torch. The last line printed is JSON, one object a
folder; the logits of the tokens in `tokens.json` of the first folder's parent are written beside the weights.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main() -> None:
    helpers, folders = sys.argv[1], [Path(folder) for folder in sys.argv[2:]]
    generation_facts = runpy.run_path(helpers)["generation_facts"]
    tokens = torch.tensor(json.loads((folders[0].parent / "tokens.json").read_text()))
    facts: list[dict[str, Any]] = []
    for folder in folders:
        model, info = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        with torch.inference_mode():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        save_file({"logits": logits.float()}, folder / "logits.safetensors.reloaded")
        problems = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
        facts.append({"class": type(model).__name__, "problems": problems, **generation_facts(model, tokens[:20])})
    imported = any(name.split(".")[0] == "compressor" for name in sys.modules)
    print(json.dumps({"imported_compressor": imported, "folders": facts}))


if __name__ == "__main__":
    main()
