"""Child process: teacher-forced log-probabilities of given tokens, by vLLM offline or by stock transformers.

Run by path: ENGINE FOLDER OUTPUT, with rows of token ids as JSON on standard input. OUTPUT gets one list a row: the
natural logarithm of the probability of every token but the first. Nothing of this repository is imported: vLLM has an
environment of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

Rows = list[list[int]]


def by_vllm(folder: str, rows: Rows) -> list[list[float]]:
    """Of the CPU build: bfloat16 is all that its Gated DeltaNet takes, and the state stands in float32."""
    from vllm import LLM, SamplingParams

    # Only through the wrapper's class: the build knows no config of a text-only Qwen3.5.
    model = LLM(
        model=folder, dtype="bfloat16", mamba_ssm_cache_dtype="float32", max_model_len=256, enforce_eager=True,
        language_model_only=True,
    )  # fmt: skip
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    answers = model.generate([{"prompt_token_ids": row} for row in rows], asked)
    return [
        [of_position[token].logprob for token, of_position in zip(row[1:], answer.prompt_logprobs[1:], strict=True)]
        for row, answer in zip(rows, answers, strict=True)
    ]


def by_transformers(folder: str, rows: Rows, dtype: str) -> list[list[float]]:
    """With fla out of reach: transformers would call its kernels on a CPU."""
    sys.modules["fla"] = None  # type: ignore[assignment]
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    found = []
    for row in rows:
        tokens = torch.tensor([row])
        with torch.no_grad():
            logarithms = model(tokens).logits[0, :-1].double().log_softmax(-1)
        found.append(logarithms.gather(1, tokens[0, 1:, None])[:, 0].tolist())
    return found


def main() -> None:
    engine, folder, output = sys.argv[1:]
    rows = json.load(sys.stdin)
    found = by_vllm(folder, rows) if engine == "vllm" else by_transformers(folder, rows, engine)
    Path(output).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
