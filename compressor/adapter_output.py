"""The folder of `--save-adapter`: what LoRA trained, apart from the merged checkpoint and never inside its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressor.data_parallel import Processes
from compressor.errors import RequestError
from compressor.export.folder import OutputFolder
from compressor.preparation import Source
from compressor.recipe import RecoverySection
from compressor.recovery.student import WHOLE_FILE
from compressor.shared_output import staged_by_main


def plan_adapter(section: RecoverySection, output: OutputFolder, source: Path, trains: bool) -> OutputFolder | None:
    """The checked folder for the adapter; None where none is to be saved. `trains`: whether the run trains.

    Raises:
        RequestError: there will be no adapter, or the folder cannot take it.
    """
    if section.save_adapter is None:
        return None
    given = Path(section.save_adapter).expanduser()
    if section.trainable != "lora":
        raise RequestError(
            f"--save-adapter {given}: --trainable {section.trainable} trains no adapter; use --trainable lora, or "
            "leave --save-adapter out: the exported checkpoint has all that was trained."
        )
    if not trains:
        raise RequestError(
            f"--save-adapter {given}: this run trains nothing; add --recover and cut at least one channel, or leave "
            "--save-adapter out."
        )
    folder = OutputFolder(given, overwrite=False)
    _refuse_nested(given, folder.path, output.path)
    if folder.path.is_dir() and any(folder.path.iterdir()):
        raise RequestError(
            f"--save-adapter {given} exists and is not empty, and --overwrite replaces the output folder alone; remove "
            "it or choose another."
        )
    try:
        folder.check(source)
    except RequestError as error:
        raise RequestError(f"--save-adapter: {error}") from error
    return folder


def _refuse_nested(given: Path, adapter: Path, output: Path) -> None:
    if adapter == output or output in adapter.parents:
        raise RequestError(
            f"--save-adapter {given} is in the output folder {output}, whose weights its loaders would then mistake; "
            f"choose a folder beside it, such as {output}-adapter."
        )
    if adapter in output.parents:
        raise RequestError(
            f"--save-adapter {given} holds the output folder {output}; choose a folder beside it, such as "
            f"{output}-adapter."
        )


@contextmanager
def staged_adapter(adapter: OutputFolder | None, processes: Processes) -> Iterator[Path | None]:
    """A new folder for the adapter, which is published at the end as an output is; None where none is to be saved."""
    if adapter is None:
        yield None
        return
    with staged_by_main(adapter, processes) as folder:
        yield folder


def describe_adapter(folder: Path, place: str, source: Source, base: str | None, output: str) -> None:
    """Write README.md into `folder`, which will stand at `place`.

    `source` is a checkpoint of the same class. `base` is the folder of the checkpoint that the adapter belongs on, None
    where it was not kept; `output` names the merged one.
    """
    # The adapter's modules are named as in this class, which the Auto class of a model with a vision tower is not.
    imports = source.architecture.load_line
    stock = source.architecture.model_class(source.checkpoint.raw_config).__name__
    stock = "AutoModelForCausalLM" if imports else stock
    code = [
        *([imports] if imports else []),
        "from peft import PeftModel",
        "from safetensors.torch import load_file",
        f"from transformers import {stock}",
        "",
        f"model = {stock}.from_pretrained({base or 'BASE'!r})",
        f"model.load_state_dict(load_file({f'{place}/{WHOLE_FILE}'!r}), strict=False)",
        f"model = PeftModel.from_pretrained(model, {place!r})",
    ]
    where = f"`{base}`" if base else "BASE, which the same run writes without training (`train: false` in its recipe)"
    text = f"""# Adapter of {output}

What recovery trained, as it was before it was merged into `{output}`. It belongs on the compressed checkpoint as it was
before training, {where}:

```python
{chr(10).join(code)}
```

`{WHOLE_FILE}` holds what no adapter fits and was trained whole: convolutions, norms and the like. Both files together
give the merged checkpoint; the adapter alone does not.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
