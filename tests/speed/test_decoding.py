"""Steps over fixed buffers give what a plain loop gives, in every family; what a graph could not capture is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compressor.architectures.cached_forward import forward_from_cache
from compressor.speed.decoding import Agreement, DecodePlan, FixedLoop, draw_tokens, prepare_decoding
from compressor.speed.states import ReplacedState, WrittenState, fixed_state, read_prompt, state_bytes
from compressor.speed.timing import Schedule
from tests.families import TinyCheckpoint, tiny_checkpoint

FAMILIES = {
    "gated_deltanet_wide_values": ReplacedState,
    "delta_net": ReplacedState,
    "gated_deltaproduct": ReplacedState,
    "m2_fla": ReplacedState,
    "q35": WrittenState,
    "qn": WrittenState,
    "qw": WrittenState,
    "oh": WrittenState,
    "m2": WrittenState,
    "bamba": WrittenState,
    "falcon_h1": WrittenState,
    "zamba2": WrittenState,
}
CPU = torch.device("cpu")
SCHEDULE = Schedule(steps=6, warm_up=2, repeats=1)


@pytest.fixture(scope="module", params=list(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, TinyCheckpoint]:
    return request.param, tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def plain_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, V] behind all tokens, by one pass without a cache: an independent account of the state."""
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits[:, -1]


def test_fixed_steps_give_the_logits_of_one_pass(tiny: tuple[str, TinyCheckpoint]) -> None:
    name, checkpoint = tiny
    prompt = draw_tokens(checkpoint.model, (3, 9), 5, CPU)
    tokens = draw_tokens(checkpoint.model, (4, 3, 1), 6, CPU)
    with torch.no_grad():
        state = fixed_state(checkpoint.model, prompt, 20, None)
        assert type(state) is FAMILIES[name]
        loop = FixedLoop(checkpoint.model, state, tokens, torch.zeros(4, 3, dtype=torch.int64), torch.zeros(3, 64))
        loop.run()
        loop.run()
    whole = torch.cat([prompt, *([tokens[:, :, 0].T] * 2)], dim=1)
    expected = plain_logits(checkpoint.model, whole)
    assert float((loop.logits - expected).norm() / expected.norm()) < 1e-4
    assert torch.equal(loop.picked[-1], expected.argmax(-1))


def test_addresses_stay(tiny: tuple[str, TinyCheckpoint]) -> None:
    _, checkpoint = tiny
    prompt = draw_tokens(checkpoint.model, (2, 9), 5, CPU)
    tokens = draw_tokens(checkpoint.model, (3, 2, 1), 6, CPU)
    with torch.no_grad():
        state = fixed_state(checkpoint.model, prompt, 20, None)
        loop = FixedLoop(checkpoint.model, state, tokens, torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 64))
        loop.run()
        before = addresses(state.cache)
        loop.run()
    assert addresses(state.cache) == before
    assert before


def addresses(cache: Any) -> list[int]:
    found: list[int] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value.data_ptr())
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif isinstance(value, list | tuple):
            for each in value:
                walk(each)

    for layer in cache.layers:
        walk(list(vars(layer).values()))
    return found


def test_the_comparison_agrees(tiny: tuple[str, TinyCheckpoint]) -> None:
    _, checkpoint = tiny
    plan = DecodePlan(prompt_length=9, call_steps=3, mode="direct")
    decoding = prepare_decoding(checkpoint.model, 2, plan, SCHEDULE, CPU)
    assert (decoding.mode, decoding.note) == ("direct", "")
    assert decoding.agreement is not None
    assert decoding.agreement.agrees
    assert decoding.agreement.error < 1e-4
    assert decoding.agreement.picked_alike == 1
    for _ in range(2):  # rounds of as many calls as the schedule asks for
        assert decoding.work.begin is not None
        decoding.work.begin()
        for _ in range(sum(plan.calls(SCHEDULE))):
            decoding.work.call()


class NoReading(TorchDispatchMode):
    """Fails where a value of a tensor is read by the host: a stream that is captured cannot wait for one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} reads a tensor")
        return func(*args, **(kwargs or {}))


def test_no_step_reads_a_tensor_on_the_host(tiny: tuple[str, TinyCheckpoint]) -> None:
    _, checkpoint = tiny
    prompt = draw_tokens(checkpoint.model, (2, 9), 5, CPU)
    tokens = draw_tokens(checkpoint.model, (2, 2, 1), 6, CPU)
    with torch.no_grad():
        state = fixed_state(checkpoint.model, prompt, 20, None)
        loop = FixedLoop(checkpoint.model, state, tokens, torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 64))
        loop.run()
        with NoReading():
            loop.run()


def test_a_state_that_is_lost_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the copy back a replayed graph would read the prompt's state again and again."""
    checkpoint = tiny_checkpoint("gated_deltanet", tmp_path)

    def put_back(self: ReplacedState) -> None:
        for state, held in zip(self.cache, self.held, strict=True):
            state.update(held)

    monkeypatch.setattr(ReplacedState, "settle", put_back)
    plan = DecodePlan(prompt_length=9, call_steps=3, mode="direct")
    agreement = prepare_decoding(checkpoint.model, 2, plan, SCHEDULE, CPU).agreement
    assert agreement is not None
    assert not agreement.agrees


def test_a_prompt_in_pieces_leaves_the_same_state(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("gated_deltanet", tmp_path)
    prompt = draw_tokens(checkpoint.model, (2, 10), 0, CPU)
    with torch.no_grad():
        whole, pieces = (read_prompt(checkpoint.model, None, prompt, piece) for piece in (None, 4))
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one["recurrent_state"], other["recurrent_state"])
        for left, right in zip(one["conv_state"], other["conv_state"], strict=True):
            torch.testing.assert_close(left, right)


def test_a_model_that_no_graph_can_replay_is_decoded_plainly(tmp_path: Path) -> None:
    """A graph on a CPU cannot be captured; the row says so and the loop is timed all the same."""
    checkpoint = tiny_checkpoint("gated_deltanet", tmp_path)
    plan = DecodePlan(prompt_length=5, call_steps=2, mode="graph")
    decoding = prepare_decoding(checkpoint.model, 1, plan, SCHEDULE, CPU)
    assert decoding.mode == "plain"
    assert decoding.note
    assert decoding.agreement is None


def test_state_bytes_count_every_tensor(tmp_path: Path) -> None:
    """2 layers: a float32 state of 2 heads x 16 x 16, and 3 convolutions of 32 channels x 4 taps, for 3 sequences."""
    checkpoint = tiny_checkpoint("gated_deltanet", tmp_path)
    with torch.no_grad():
        _, cache = forward_from_cache(checkpoint.model, None, input_ids=draw_tokens(checkpoint.model, (3, 8), 0, CPU))
    assert state_bytes(cache) == 3 * 2 * 4 * (2 * 16 * 16 + 3 * 32 * 4)


def test_an_infinite_error_does_not_agree() -> None:
    assert not Agreement(float("inf"), 1.0, 0.05).agrees
