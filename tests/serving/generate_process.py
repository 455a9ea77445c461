"""Child process: what stock transformers generates greedily, one prompt at a time, with fla out of reach.

Run by path. Reads {"prompts": [text], "chats": [[message]], "new_tokens": n} and prints the same lists of
{"text", "prompt_tokens", "new_tokens"}.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    sys.modules["fla"] = None  # type: ignore[assignment]
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, request = sys.argv[1], json.load(sys.stdin)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(text: str) -> dict[str, object]:
        prompt = torch.tensor([tokenizer(text)["input_ids"]])
        generated = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=request["new_tokens"]
        )
        new = generated[0, prompt.shape[1] :]
        decoded = tokenizer.decode(new, skip_special_tokens=True)
        return {"text": decoded, "prompt_tokens": prompt.shape[1], "new_tokens": len(new)}

    chats = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in request["chats"]]
    result = {"prompts": [answer(text) for text in request["prompts"]], "chats": [answer(text) for text in chats]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
