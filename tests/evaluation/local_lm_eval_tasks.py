"""Tasks of lm-eval with data of their own: one of every kind of request."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = [
    {
        "question": "In the beginning God created the heaven and the",
        "choices": ["earth", "table", "seventh day"],
        "gold": 0,
    },
    {"question": "She went to the", "choices": ["window", "of", "and yet again into"], "gold": 2},
    {"question": "def f(x):\n    return", "choices": ["x", "whale oil", "None"], "gold": 0},
    {"question": "Once upon a", "choices": ["of of", "time", "table"], "gold": 1},
]
PAGES = [
    {"page": "It was the best of times, it was the worst of times."},
    {"page": "The Lord said unto Moses, Go unto Pharaoh, and say unto him, Let my people go."},
    {"page": "import numpy as np\n\nx = np.zeros(3)"},
]
GENERATIONS = [
    {"text": "The key is BLUE. The other key is RED. The key is", "value": "blue"},
    {"text": "It was a dark night, and", "value": "zzz"},
    {"text": "She said to him that she", "value": "had"},
    {"text": "He said to her that he", "value": "had"},
]
TASKS = {
    "local_choice": (
        QUESTIONS,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
            ],
            "metadata": {"version": 3.0},
        },
    ),
    "local_page": (
        PAGES,
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{page}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
    ),
    "local_last_word": (
        PAGES,
        {
            "output_type": "loglikelihood",
            "doc_to_text": "{{page.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+page.split(' ')[-1]}}",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            ],
        },
    ),
    "local_generation": (
        GENERATIONS,
        {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{value}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [
                {
                    "metric": "exact_match",
                    "aggregation": "mean",
                    "higher_is_better": True,
                    "ignore_case": True,
                    "ignore_punctuation": True,
                }
            ],
        },
    ),
}


def write_local_tasks(folder: Path) -> None:
    for name, (rows, fields) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_task(folder, name, {"dataset_kwargs": {"data_files": {"test": str(data)}}} | fields)


def write_task(folder: Path, name: str, fields: dict[str, object]) -> None:
    base: dict[str, object] = {"task": name, "dataset_path": "json", "test_split": "test"}
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(base | fields))
