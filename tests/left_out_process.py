"""One of two processes that find different memory, and what each then leaves out of the methods that auto tries.

    accelerate launch --num_processes 2 --module tests.left_out_process SOURCE TEXT FOLDER

The second is given statistics, so that the gradient, for which the first has no room, would cost it nothing. Each
writes {"methods", "notes"} to the file of FOLDER that is called by its number.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from compressor.data_parallel import join_processes, leave_processes
from compressor.needed_statistics import within_memory
from compressor.planning import RunOptions, plan_run
from compressor.recipe import Recipe

SAMPLES = 10**8


def main(source: str, text: str, folder: Path) -> None:
    calibration = {"source": text, "samples": SAMPLES, "batch_size": SAMPLES, "retrieval_share": 0.0}
    recipe = Recipe.from_settings(
        {
            "model": source,
            "output_dir": str(folder / "out"),
            "selection": {"target_dim": 8, "method": "auto"},
            "calibration": calibration,
            "runtime": {"device": "cpu"},
            "export": {"evaluate": False},
        }
    )
    processes = join_processes("cpu")
    with processes.failing_together():
        options = RunOptions(statistics=Path("given") if processes.index else None)
        plan = within_memory(plan_run(recipe, options), options, processes)
        said = {"methods": plan.methods, "notes": plan.notes}
        (folder / str(processes.index)).write_text(json.dumps(said), encoding="utf-8")
    leave_processes()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
