"""The folder of `--save-adapter`: what LoRA trained, apart from the merged checkpoint and never inside its folder."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressor.adapter_checks import refuse_nested, refuse_no_adapter
from compressor.calibration.text import DEMO
from compressor.data_parallel import Processes
from compressor.errors import RequestError, RunError
from compressor.export.disk import translate_write_errors
from compressor.export.folder import OutputFolder
from compressor.home_folders import expanded
from compressor.naming import Naming
from compressor.preparation import Source
from compressor.recipe import Recipe, RecoverySection
from compressor.recovery.student import WHOLE_FILE
from compressor.shared_output import staged_by_main

BASE_RECIPE_FILE = "base_recipe.yaml"
"""Of the run without its training: what gives the checkpoint that the adapter belongs on."""


def plan_adapter(
    section: RecoverySection, output: OutputFolder, source: Path, trains: bool, name: Naming
) -> OutputFolder | None:
    """The checked folder for the adapter; None where none is to be saved. `trains`: whether the run trains.

    Raises:
        RequestError: there will be no adapter, or the folder cannot take it.
    """
    if section.save_adapter is None:
        return None
    refuse_no_adapter(section, trains, name)
    given = expanded(section.save_adapter)
    folder = OutputFolder(given, overwrite=False)
    refuse_nested(given, folder.path, output.path, name)
    if _is_filled(folder):
        raise RequestError(
            f"{name('recovery.save_adapter', given)} exists and is not empty, and --overwrite replaces the output "
            "folder alone; remove it or choose another."
        )
    try:
        folder.check(source)
    except RequestError as error:
        raise RequestError(f"{name('recovery.save_adapter')}: {error}") from error
    return folder


@contextmanager
def staged_with_adapter(
    output: OutputFolder, adapter: OutputFolder | None, processes: Processes
) -> Iterator[tuple[Path, Path | None]]:
    """New folders for the output and, None where none is to be saved, the adapter; at the end both are published.

    Where one cannot take its place, none does: a resumed run finds both places as this one did.

    Raises:
        RunError: something came to the adapter's place meanwhile; as `staged_by_main`.
    """
    if adapter is None:
        with staged_by_main(output, processes) as folder:
            yield folder, None
        return
    _refuse_taken(adapter, processes)
    published, staged = False, (0, 0)
    try:
        with staged_by_main(output, processes) as folder:
            staged = _identity(folder)
            # What is written meanwhile is the output, but for the adapter's own files, whose writers name it.
            with staged_by_main(adapter, processes) as own, translate_write_errors(output.path, None):
                yield folder, own
                _refuse_taken(adapter, processes)
            published = processes.is_main
    finally:
        # A signal may come after the output took its place.
        if published and (not output.path.exists() or _identity(output.path) != staged):
            shutil.rmtree(adapter.path, ignore_errors=True)


def _identity(folder: Path) -> tuple[int, int]:
    """What a folder keeps when it is renamed."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def _is_filled(folder: OutputFolder) -> bool:
    return folder.path.is_dir() and any(folder.path.iterdir())


def _refuse_taken(adapter: OutputFolder, processes: Processes) -> None:
    if processes.is_main and _is_filled(adapter):
        raise RunError(
            f"the place of the adapter changed during the run: {adapter.path} is not empty any more; remove it or give "
            "another --save-adapter, and run again with --resume."
        )


def describe_adapter(
    folder: Path, adapter: OutputFolder, output: OutputFolder, source: Source, base: Recipe | Path
) -> None:
    """Write README.md into `folder`, which will stand at the place of `adapter`.

    `source` is a checkpoint of the same class as the merged one in `output`. `base` is the folder of the checkpoint
    that the adapter belongs on, or, where that was not kept, the run's recipe.

    Raises:
        RunError: no space left.
    """
    with translate_write_errors(adapter.path, None):
        if isinstance(base, Recipe):
            untrained = _untrained(base, output)
            (folder / BASE_RECIPE_FILE).write_text(untrained.to_yaml(), encoding="utf-8")
            command = f"compress --recipe {shlex.quote(str(adapter.path / BASE_RECIPE_FILE))}"
            steps = f"training. The same run without it writes that one:\n\n```bash\n{command}\n```\n\nThen:"
            place = str(untrained.output_dir)
        else:
            steps, place = "training:", str(base.absolute())
        text = _readme(source, output.path.name, steps, place, str(adapter.path))
        (folder / "README.md").write_text(text, encoding="utf-8")


def _untrained(recipe: Recipe, output: OutputFolder) -> Recipe:
    """The recipe without training, which can be run from any folder."""
    calibration = recipe.calibration.model_copy(update={"source": _anywhere(recipe.calibration.source)})
    evaluation = recipe.evaluation.model_copy(update={"texts": [_anywhere(text) for text in recipe.evaluation.texts]})
    recovery = recipe.recovery.model_copy(update={"train": False, "save_adapter": None, "evaluate_every": 0})
    return recipe.model_copy(
        update={
            "model": None if recipe.model is None else _anywhere(recipe.model),
            "output_dir": f"{output.path}-untrained",
            "calibration": calibration,
            "evaluation": evaluation,
            "recovery": recovery,
        }
    )


def _anywhere(name: str) -> str:
    """The absolute path of a file or folder; what is neither, an id on the Hub say, as it is."""
    path = expanded(name)
    return str(path.absolute()) if name != DEMO and path.exists() else name


def _readme(source: Source, merged: str, steps: str, base: str, adapter: str) -> str:
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
        f"base = {base!r}  # the compressed checkpoint before training",
        f"adapter = {adapter!r}  # this folder",
        f"model = {stock}.from_pretrained(base)",
        f'model.load_state_dict(load_file(f"{{adapter}}/{WHOLE_FILE}"), strict=False)',
        "model = PeftModel.from_pretrained(model, adapter)",
    ]
    return f"""# Adapter of {merged}

What recovery trained, as it was before it was merged into `{merged}`. It belongs on the compressed checkpoint as it was
before {steps}

```python
{chr(10).join(code)}
```

`{WHOLE_FILE}` holds what no adapter fits and was trained whole: convolutions, norms and the like. Both files together
give the merged checkpoint; the adapter alone does not. peft's Auto classes would leave that file out, and so
`adapter_config.json` names no base model for them.
"""
