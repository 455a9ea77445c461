"""The probe of simulated cuts: against states of real cut checkpoints, and its table against figures made by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cuts import Bench
from benchmarks.probe_selector_figures import draw_probes, head_use, print_probes
from benchmarks.probe_selectors import METHODS, cuts, parse_arguments, probe_cut
from benchmarks.resumable import Row
from compressor.architectures.family import family_of
from compressor.calibration.tokenizer import load_tokenizer
from compressor.errors import RequestError
from compressor.evaluation.measure import Material
from compressor.preparation import open_model, open_source
from compressor.probe.spectra import FIGURES
from compressor.probe.states import Probed, measure_states
from tests.architectures.test_cut import cut
from tests.families import random_selection, tiny_checkpoint, tiny_tokens
from tests.tiny_models import save_tiny_tokenizer


@pytest.mark.parametrize("name", ["gated_deltanet_grouped", "gated_deltaproduct"])
def test_simulated_cuts_have_the_states_of_cut_checkpoints(name: str, tmp_path: Path) -> None:
    tiny = tiny_checkpoint(name, tmp_path / "model")
    save_tiny_tokenizer(tiny.folder)
    selection = random_selection(tiny.mixers, 6)
    source = open_source(open_model(str(tiny.folder), None))
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    bench = Bench(source, tiny.model, tiny.model, tokenizer, Material((), (), "teacher-forced", 2))
    documents = [tiny_tokens(128, seed) for seed in range(3)]
    row = probe_cut(bench, selection.kept, "keep", documents, 64)
    smaller = cut(tiny, tmp_path / "cut", selection, "keep")
    probed = Probed(smaller.model, smaller.architecture, smaller.mixers, family_of(smaller.raw_config))
    expected = measure_states(probed, documents, 64, 2, lambda tokens: None)
    medians = expected.end.quantile(0.5, dim=0)
    for index, figure in enumerate(FIGURES[:-1]):
        found = torch.tensor(row["heads"][figure], dtype=torch.float64)
        torch.testing.assert_close(found, medians[:, index], rtol=1e-3, atol=1e-3)
    assert row["tokens"] == [64, 128]
    along = expected.along[..., FIGURES.index("utilisation")].mean((0, 2)).tolist()
    assert row["utilisation"] == pytest.approx(along, rel=1e-3)
    losses = [float(each.losses.double().mean()) for each in expected.losses]
    assert row["losses"] == pytest.approx(losses, rel=1e-3)
    assert row["singular_values"] == pytest.approx(torch.stack(expected.singular_values).mean(0).tolist(), abs=1e-3)


def row_of(method: str, utilisation: list[float], conditions: list[float | None], losses: list[float]) -> Row:
    heads: dict[str, Any] = {"utilisation": utilisation, "condition_number": conditions}
    heads["entropy_effective_rank"] = [2.0, 3.0, 4.0, 7.0]
    return {
        "model": "m", "method": method, "ratio": 0.0 if method == "dense" else 0.5, "norm_epsilon": "keep",
        "key_dim": 8, "losses": losses, "heads": heads, "singular_values": [1.0, 0.5], "tokens": [64, 128],
        "utilisation": [0.1, 0.2],
    }  # fmt: skip


def test_table_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = row_of("dense", [0.1, 0.2, 0.3, 0.4], [50.0, None, 9.0, 20.0], [2.0, 3.0])
    pruned = row_of("drrqr", [0.2, 0.3, 0.5, 0.4], [None, None, None, 3.0], [2.5, 3.7])
    use = head_use(pruned, dense)
    assert use.pearson == pytest.approx(0.8)
    assert use.spearman == pytest.approx(0.8)
    assert use.rise is not None
    assert (use.rise.mean, use.rise.standard_error) == pytest.approx((0.6, 0.1))
    assert (use.utilisation, use.effective_rank, use.condition) == (pytest.approx(0.35), 4.0, None)
    assert use.bound == pytest.approx((0.4**-0.5 + 0.3**-0.5) / 2)
    assert use.least_margin == pytest.approx(3 * 0.4**0.5)
    own = head_use(dense, dense)
    assert (own.rise, own.pearson, own.condition) == (None, None, 35.0)
    print_probes([dense, pruned])
    assert "+0.6000 +- 0.1000" in capsys.readouterr().out
    draw_probes([dense, pruned], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RequestError, match="no row of m as it is"):
        print_probes([pruned])


def test_rows_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["probe_selectors", "--ratios", "0.5", "0.75", "--norm-epsilon", "keep", "scaled"])
    arguments: argparse.Namespace = parse_arguments()
    asked = [(cut["method"], cut["ratio"], cut["norm_epsilon"]) for cut in cuts(arguments)]
    assert asked[0] == ("dense", 0.0, "keep")
    assert asked[1:] == [(m, r, e) for m in METHODS for r in (0.5, 0.75) for e in ("keep", "scaled")]
