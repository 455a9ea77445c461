"""The kept width: rounding, and what is refused."""

from __future__ import annotations

import pytest

from compressor.cli import main
from compressor.errors import RequestError
from compressor.naming import key_of
from compressor.width import check_allocation, kept_width


@pytest.mark.parametrize(
    ("head_k_dim", "ratio", "round_to", "keep"),
    [
        (128, 0.5, 16, 64),
        (128, 0.25, 16, 96),
        (128, 0.75, 16, 32),
        (128, 0.3, 16, 96),
        (128, 0.3, 1, 90),
        (128, 0.9, 16, 16),
        (128, 0.0, 16, 128),
        (100, 0.5, 16, 48),
        (64, 0.99, 1, 1),
        (96, 0.5, 32, 64),
    ],
)
def test_ratio(head_k_dim: int, ratio: float, round_to: int, keep: int) -> None:
    assert kept_width(head_k_dim, ratio, None, round_to) == keep


def test_target_is_not_rounded() -> None:
    assert kept_width(128, None, 37, 16) == 37
    assert kept_width(128, None, 128, 16) == 128


def test_target_over_the_present_width() -> None:
    with pytest.raises(
        RequestError, match=r"^--target-dim 129 is more than the 128 key channels a head has; give 1 to"
    ):
        kept_width(128, None, 129, 16)


def test_rounding_to_nothing() -> None:
    message = r"^--ratio 0.95 leaves 6.4 of 128 key channels, which --round-to 16 rounds to 0; .*--round-to 4\.$"
    with pytest.raises(RequestError, match=message):
        kept_width(128, 0.95, None, 16)
    assert kept_width(128, 0.95, None, 4) == 8


def test_a_remedy_helps_where_no_rounding_does() -> None:
    with pytest.raises(RequestError, match=r"rounds to 0; use a ratio of at most 0\.984375 and --round-to 1\.$"):
        kept_width(64, 0.999, None, 16)
    assert kept_width(64, 0.984375, None, 1) == 1
    with pytest.raises(RequestError, match=r"nothing would be removed; use a larger ratio\.$"):
        kept_width(64, 1e-9, None, 1)


def test_a_ratio_is_called_as_its_user_gave_it() -> None:
    with pytest.raises(
        RequestError, match=r"^selection\.ratio: 0\.9500001 leaves 6\.3\d+ of 128 key channels, which sel"
    ):
        kept_width(128, 0.9500001, None, 16, key_of)


def test_rounding_to_everything() -> None:
    message = (
        r"^--ratio 0.05 leaves 60.8 of 64 key channels, which --round-to 16 rounds to 64: nothing would be removed"
    )
    with pytest.raises(RequestError, match=message):
        kept_width(64, 0.05, None, 16)
    with pytest.raises(RequestError, match="nothing would be removed"):
        kept_width(32, 0.4, None, 32)


def test_widths_of_their_own_are_refused_before_anything_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["nowhere", "--ratio", "0.5"], ["sweep", "nowhere", "--output-dir", "out"]):
        assert main([*words, "--allocation", "per-layer"]) == 2
        error = capsys.readouterr().err
        assert "no stock class would load the result; leave it at uniform." in error
        assert "nowhere" not in error
        assert main([*words, "--allocation", "uniform"]) == 2
        assert "nowhere" in capsys.readouterr().err
    with pytest.raises(RequestError, match='--allocation "layer" is none; give uniform'):
        check_allocation("layer")
