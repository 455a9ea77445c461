from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from compressor.export.base_card import BaseLicense, read_license, read_pipeline_tag
from compressor.export.model_card import ModelCardFacts, card_of_repository, render_model_card
from tests.tiny_models import save_tiny, save_tiny_tokenizer

FACTS = ModelCardFacts(
    model_name="pruned",
    base_name="Qwen/Qwen3.5-0.8B",
    base_model="Qwen/Qwen3.5-0.8B",
    base_revision="0123abc",
    license=BaseLicense("apache-2.0", None, None),
    model_type="qwen3_5_text",
    needs_fla=False,
    trust_remote_code=False,
    method="drrqr",
    scoring="qk",
    ratio=0.5,
    max_rho=1.0375,
    key_dim_before=128,
    key_dim_after=64,
    state_bytes_before=18_874_368,
    state_bytes_after=9_437_184,
    parameters_before=1_000_000,
    parameters_after=990_000,
    norm_epsilon="scaled",
    norm_epsilon_before=1e-6,
    norm_epsilon_after=2e-6,
    calibration_source="HuggingFaceFW/fineweb",
    calibration_tokens=262_144,
    calibration_sequence_length=2048,
    calibration_seed=7,
    calibration_sha256="ab" * 32,
    figures=(
        ("perplexity a token, prose", "30.97", "34.30", ""),
        ("niah_single_1 at 512", "100.0%", "91.7%", "-8.3 ± 5.8"),
    ),
    recovery=None,
    engine_notes=("vLLM on Hopper: `--gdn-prefill-backend triton`",),
    versions=(("linear-attention-compressor", "0.1.0"), ("torch", "2.13.0")),
)
UNKNOWN = dataclasses.replace(
    FACTS,
    base_name="my | model",
    base_model=None,
    base_revision=None,
    license=None,
    max_rho=None,
    norm_epsilon_before=None,
    norm_epsilon_after=None,
    calibration_sha256=None,
    figures=(),
    engine_notes=(),
    versions=(),
)


def python_block(card: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return str(block)


def table_row(card: str, start: str) -> list[str]:
    (row,) = [line for line in card.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_metadata_is_what_the_hub_reads() -> None:
    data = ModelCard(render_model_card(FACTS)).data.to_dict()
    assert data == {
        "base_model": "Qwen/Qwen3.5-0.8B",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["linear-attention", "state-compression", "pruning", "qwen3_5_text"],
    }


def test_metadata_of_a_local_fla_model_with_its_own_licence() -> None:
    facts = dataclasses.replace(
        FACTS, base_model=None, needs_fla=True, license=BaseLicense("other", "qwen: research", "LICENSE")
    )
    data = ModelCard(render_model_card(facts)).data.to_dict()
    assert "base_model" not in data
    assert data["library_name"] == "transformers"
    assert data["tags"][-1] == "flash-linear-attention"
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "qwen: research", "LICENSE")


def test_tables() -> None:
    card = render_model_card(FACTS)
    assert table_row(card, "Key/query width") == ["128", "64", "-50.0%"]
    assert table_row(card, "State bytes") == ["18,874,368", "9,437,184", "-50.0%"]
    assert table_row(card, "Parameters") == ["1,000,000", "990,000", "-1.0%"]
    assert table_row(card, "perplexity a token, prose") == ["30.97", "34.30", ""]
    assert table_row(card, "niah_single_1 at 512") == ["100.0%", "91.7%", "-8.3 ± 5.8"]


def test_how_it_was_made() -> None:
    card = render_model_card(FACTS)
    for part in (
        "[Qwen/Qwen3.5-0.8B](https://huggingface.co/Qwen/Qwen3.5-0.8B) at revision `0123abc`",
        "Method: `drrqr`, scored on `qk`; worst `rho` over all heads: 1.0375",
        "Ratio: 0.5 (the share of key/query channels removed)",
        "Norm epsilon: scaled (1e-06 before, 2e-06 after)",
        "262,144 tokens of `HuggingFaceFW/fineweb`, in sequences of at most 2,048 tokens, seed 7",
        "ab" * 32,
        "- vLLM on Hopper: `--gdn-prefill-backend triton`",
        "Perplexity does not see memory loss",
        "No recovery training was done",
        "compress --recipe recipe.yaml",
        "linear-attention-compressor 0.1.0, torch 2.13.0",
        "model card of the base model",
    ):
        assert part in card


def test_what_was_not_measured_is_said_so() -> None:
    card = render_model_card(UNKNOWN)
    assert "Perplexity, divergence and memory (retrieval) were not measured." in card
    assert "worst `rho` over all heads: not measured" in card
    assert "Norm epsilon: scaled\n" in card
    assert "None" not in card
    assert "## Engines" not in card


def test_recovery_is_told_in_place_of_its_absence() -> None:
    card = render_model_card(dataclasses.replace(FACTS, recovery="LoRA,\n120 steps"))
    assert card.count("LoRA, 120 steps") == 2
    assert "No recovery training" not in card


def test_names_break_no_markdown() -> None:
    card = render_model_card(dataclasses.replace(UNKNOWN, base_name="a`b\nc", figures=(("on x | y\nz", "1", "2", ""),)))
    assert "`a'b c`" in card
    assert r"on x \| y z |" in card
    assert "\n## Figures\n" in card


def test_the_load_lines_load_a_transformers_family(tmp_path: Path) -> None:
    folder = save_tiny_tokenizer(save_tiny("q35", tmp_path / 'a "quoted" name'))
    card = render_model_card(dataclasses.replace(FACTS, model_name=str(folder)))
    block = python_block(card)
    assert "fla" not in block
    assert "trust_remote_code" not in block
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"


def test_the_load_lines_load_an_fla_family(demo_model: Path) -> None:
    card = render_model_card(dataclasses.replace(FACTS, model_name=str(demo_model), needs_fla=True))
    names: dict[str, object] = {}
    exec(compile(python_block(card), "README.md", "exec"), names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module)
    assert type(model).__name__ == "GatedDeltaNetForCausalLM"
    assert next(model.parameters()).dtype == torch.bfloat16


def test_the_card_of_a_repository_names_it() -> None:
    notes = ("vLLM: runs (x; source): `vllm serve MODEL`", "llama.cpp: refused (MODEL_X; source)")
    local = render_model_card(dataclasses.replace(FACTS, engine_notes=notes, model_name='a "b" MODEL'))
    assert "MODEL stands for the path of this folder, or its id on the Hub.\n\n- vLLM" in local
    card = card_of_repository(local, "someone/half")
    assert 'name = "someone/half"  # the path of this folder, or its id on the Hub\n' in card
    assert "## Engines\n\n- vLLM: runs (x; source): `vllm serve someone/half`\n- llama.cpp: refused (MODEL_X" in card
    assert '# a "b" MODEL\n' in card
    assert card_of_repository(card, "someone/half") == card
    written = "# Mine\n\nname = my_model\n\n```bash\nvllm serve MODEL\n```\n"
    assert card_of_repository(written, "someone/half") == written


def test_the_limitation_of_a_key_only_cut() -> None:
    assert "Only keys and queries have 64 channels a head now" in render_model_card(FACTS)
    assert "Only keys and queries" not in render_model_card(dataclasses.replace(FACTS, key_dim_after=128))


def test_remote_code_is_asked_for_in_both_lines() -> None:
    block = python_block(render_model_card(dataclasses.replace(FACTS, trust_remote_code=True)))
    assert block.count("trust_remote_code=True") == 2
    compile(block, "README.md", "exec")


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlicense: mit\n---\n# x\n", BaseLicense("mit", None, None)),
        ("\ufeff---\r\nlicense: mit\r\n---\r\n", BaseLicense("mit", None, None)),
        ("---\nlicense:\n- mit\n---", BaseLicense("mit", None, None)),
        (
            "---\nlicense: other\nlicense_name: qwen\nlicense_link: https://x/y\ndate: 2023-99-99\n---\n",
            BaseLicense("other", "qwen", "https://x/y"),
        ),
        ("---\nlicense: [mit, apache-2.0]\n---\n", BaseLicense(("mit", "apache-2.0"), None, None)),
        ("\n \n--- \nlicense: Apache-2.0\n---\t\n# x\n", BaseLicense("apache-2.0", None, None)),
        ("---\rlicense: openrail++\r---\r", BaseLicense("openrail++", None, None)),
        ("---\nlicense: mit\nlicense_name: |\n  two\n  lines\n---\n", BaseLicense("mit", None, None)),
        ('---\nlicense: "foo bar\\nbaz"\n---\n', None),
        ("---\nlicense: [mit, a b]\n---\n", None),
        ("---\nlicense: [mit, [mit]]\n---\n", None),
        ("---\nlicense: []\n---\n", None),
        ("---\nlicense:\n---\n", None),
        ("---\nlicense: {a: b}\n---\n", None),
        ("---\nlicense: 'unclosed\n---\n", None),
        ("---\n- a list\n---\n", None),
        ("---\nlanguage: en\n---\n", None),
        ("# no metadata\n---\nlicense: mit\n---\n", None),
        ("", None),
    ],
)
def test_the_licence_of_the_base(tmp_path: Path, readme: str, expected: BaseLicense | None) -> None:
    (tmp_path / "README.md").write_bytes(readme.encode())
    assert read_license(tmp_path) == expected


def test_no_readme_no_licence(tmp_path: Path) -> None:
    assert read_license(tmp_path) is None
    assert read_pipeline_tag(tmp_path) == "text-generation"


@pytest.mark.parametrize("kind", ["folder", "unreadable", "pipe", "loop"])
def test_a_readme_that_cannot_be_read_names_nothing(tmp_path: Path, kind: str) -> None:
    readme = tmp_path / "README.md"
    if kind == "folder":
        readme.mkdir()
    elif kind == "pipe":
        os.mkfifo(readme)
    elif kind == "loop":
        readme.symlink_to(readme)
    else:
        readme.write_text("---\nlicense: mit\n---\n")
        readme.chmod(0)
        if os.access(readme, os.R_OK):
            pytest.skip("root reads every file")
    assert read_license(tmp_path) is None
    assert read_pipeline_tag(tmp_path) == "text-generation"


@pytest.mark.parametrize("key", ["license", "model"])
@pytest.mark.parametrize(
    "value",
    ["[" * 3_000, "[" * 5_000, '"\\UFFFFFFFF"', "&a [*a]", "\x00"],
    ids=["shallower nesting", "nesting", "escape", "recursion", "NUL"],
)
def test_metadata_that_yaml_fails_on_name_nothing(tmp_path: Path, value: str, key: str) -> None:
    """A card from the Hub must not end a run with a traceback: deep nesting and an escape beyond Unicode do in yaml."""
    others = "" if key == "license" else "license: mit\n"
    (tmp_path / "README.md").write_text(f"---\n{others}{key}: {value}\n---\n")
    assert read_license(tmp_path) is None
    assert read_pipeline_tag(tmp_path) == "text-generation"


def test_the_task_is_that_of_the_base(tmp_path: Path) -> None:
    for line, expected in (
        ("pipeline_tag: image-text-to-text", "image-text-to-text"),
        ("license: mit", "text-generation"),
        ("pipeline_tag: {a: b}", "text-generation"),
        ("pipeline_tag: not a task", "text-generation"),
        ("pipeline_tag: [text-to-image, image-to-text]", "text-generation"),
    ):
        (tmp_path / "README.md").write_text(f"---\n{line}\n---\n")
        assert read_pipeline_tag(tmp_path) == expected
    card = render_model_card(dataclasses.replace(FACTS, pipeline_tag="image-text-to-text"))
    assert ModelCard(card).data.to_dict()["pipeline_tag"] == "image-text-to-text"


def test_our_own_card_passes_the_licence_on(tmp_path: Path) -> None:
    """A model that is compressed again."""
    several = BaseLicense(("mit", "apache-2.0"), None, None)
    (tmp_path / "README.md").write_text(render_model_card(dataclasses.replace(FACTS, license=several)))
    assert read_license(tmp_path) == several
    assert ModelCard.load(tmp_path / "README.md").data.to_dict()["license"] == ["mit", "apache-2.0"]
    licence = BaseLicense("other", "name: with colon", "LICENSE")
    (tmp_path / "README.md").write_text(render_model_card(dataclasses.replace(FACTS, license=licence)))
    assert read_license(tmp_path) == licence
    assert yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1])["license_name"] == "name: with colon"


def test_what_is_special_about_loading_stands_under_the_code() -> None:
    note = "Load it where `fla` is not imported."
    card = render_model_card(dataclasses.replace(FACTS, loading_note=note))
    assert f"```\n\n{note}\n\n## " in card
    assert note not in render_model_card(FACTS)
