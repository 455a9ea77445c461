"""Calibration of a model larger than memory: every batch through one decoder layer, then through the next one.

The stock decoder is run as it is, once for every layer and batch. Layers that are done stand aside and return what
the last of them gave before, so that the decoder itself makes masks and positions and hands the activations on;
behind the layer whose turn it is, the pass ends. Each layer's weights are read once, and sums are taken in
the order of the batches as in `run.calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from compressor.architectures.base import Architecture, Mixer
from compressor.artifacts import CalibrationProgress, CalibrationStatistics
from compressor.calibration.inputs import InputAccumulator
from compressor.calibration.layer_outputs import LayerOutputs
from compressor.calibration.offloaded import OffloadedModel, block_of, layer_stack
from compressor.calibration.run import statistics_of
from compressor.calibration.statistics import GramAccumulator
from compressor.calibration.tokens import TokenBatch
from compressor.errors import RunError

OnLayer = Callable[[CalibrationProgress], None]


class _LayerDone(Exception):  # noqa: N818  (no error: it ends a pass)
    """Ends a forward pass behind the layer whose turn it is."""


def num_layers(mixers: Sequence[Mixer]) -> int:
    """Decoder layers that calibration runs: up to the last mixer's."""
    return max(_position(mixer) for mixer in mixers) + 1


def can_go_on(start: CalibrationProgress, mixers: Sequence[Mixer], outputs: LayerOutputs, batches: int) -> bool:
    """Whether what the layer after `start` reads is still there for all batches, or no layer is left."""
    return start.batches == num_layers(mixers) or outputs.has(start.batches - 1, batches)


def calibrate_layerwise(
    architecture: Architecture,
    offloaded: OffloadedModel,
    mixers: Sequence[Mixer],
    batches: Sequence[TokenBatch],
    outputs: LayerOutputs,
    start: CalibrationProgress | None,
    on_layer: OnLayer,
    advance: Callable[[int], None],
    *,
    energy: bool = False,
    input_squares: bool = False,
) -> CalibrationStatistics:
    """As `run.calibrate`, with the weights of one layer in memory and the activations between layers in `outputs`.

    `on_layer` gets the sums of the layers done so far; its `batches` counts layers, and so does that of `start`, with
    which an interrupted pass goes on: see `can_go_on`. `advance` gets the tokens of each batch just done, once for each
    of `num_layers`.

    Raises:
        ValueError: `start` lacks sums that are asked for.
        RunError: a layer was not run or gives what cannot be kept, a mixer was not captured, or activations are NaN or
            infinite (layer and head named).
    """
    stack = layer_stack(offloaded.model, mixers)
    by_layer = {_position(mixer): mixer for mixer in mixers}
    layers, tokens = num_layers(mixers), sum(batch.num_tokens for batch in batches)
    if start is not None and not can_go_on(start, mixers, outputs, len(batches)):
        start = None
    done, sums = _started(start, energy, input_squares)
    if done == 0:
        outputs.clear()
        _save_embeddings(offloaded, batches, outputs)
    advance(done * tokens)
    for layer in range(done, layers):
        runner = _LayerPass(architecture, offloaded, stack, layer, layer + 1 == layers, outputs, advance)
        if layer in by_layer:
            sums.append(_sums_of(runner, by_layer[layer], batches, energy, input_squares))
        else:
            runner.run(batches, None, None)
        if sums:
            on_layer(_joined(sums, layer + 1))
        outputs.remove(layer - 1)
    return statistics_of(_joined(sums, layers), mixers, tokens)


class _LayerPass:
    """All batches through decoder layer `layer`, whose inputs are in `outputs`, where its outputs go if not `last`."""

    def __init__(
        self,
        architecture: Architecture,
        offloaded: OffloadedModel,
        stack: str,
        layer: int,
        last: bool,
        outputs: LayerOutputs,
        advance: Callable[[int], None],
    ) -> None:
        self.architecture = architecture
        self.offloaded = offloaded
        self._layer = layer
        self._last = last
        self._path = f"{stack}.{layer}"
        self._done = [offloaded.model.get_submodule(f"{stack}.{before}") for before in range(layer)]
        self._outputs = outputs
        self._advance = advance

    @torch.inference_mode()
    def run(
        self, batches: Sequence[TokenBatch], moments: GramAccumulator | None, inputs: InputAccumulator | None
    ) -> None:
        expected = 0
        with self.offloaded.materialised(self._path):
            for number, batch in enumerate(batches):
                mask = None if batch.attention_mask is None else batch.attention_mask.to(self.offloaded.device)
                for accumulator in (moments, inputs):
                    if accumulator is not None:
                        accumulator.begin_batch(mask)
                output = self._output(number, mask)
                if not self._last:
                    self._outputs.save_output(self._layer, number, output)
                expected += batch.num_tokens
                if moments is not None:
                    moments.end_batch(expected)
                if inputs is not None:
                    inputs.end_batch(batch.num_tokens)
                self._advance(batch.num_tokens)

    def _output(self, number: int, mask: Tensor | None) -> Any:
        """What the layer returns for one batch."""
        device, seen = self.offloaded.device, list[Any]()
        before = None if self._layer == 0 else self._outputs.output(self._layer - 1, number, device)

        def end(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            seen.append(output)
            raise _LayerDone

        decoder = self.architecture.decoder(self.offloaded.model)
        with ExitStack() as stack:
            for layer in self._done:
                stack.enter_context(_standing_aside(layer, before))
            layer = self.offloaded.model.get_submodule(self._path)
            stack.callback(layer.register_forward_hook(end).remove)
            try:
                embeddings = self._outputs.embeddings(number).to(device)
                decoder(inputs_embeds=embeddings, attention_mask=mask, use_cache=False)
            except _LayerDone:
                return seen[0]
        raise RunError(
            f"{self._path} was not run in a forward pass; the installed library runs its layers in a way this version "
            "does not know: calibrate without --low-memory."
        )


@contextmanager
def _standing_aside(layer: nn.Module, output: Any) -> Iterator[None]:
    """While active, `layer` computes nothing and returns `output`."""
    forward = layer.forward
    layer.forward = lambda *arguments, **settings: output
    try:
        yield
    finally:
        layer.forward = forward


def _sums_of(
    runner: _LayerPass, mixer: Mixer, batches: Sequence[TokenBatch], energy: bool, input_squares: bool
) -> CalibrationProgress:
    """The sums of one mixer."""
    architecture, model, device = runner.architecture, runner.offloaded.model, runner.offloaded.device
    moments = GramAccumulator([mixer], device, energy)
    inputs = InputAccumulator(architecture, model, [mixer], device) if input_squares else None
    watching = nullcontext() if inputs is None else inputs.watching()
    with architecture.tapped(model, [mixer], moments), watching:
        runner.run(batches, moments, inputs)
    return CalibrationProgress(
        len(batches), moments.grams, moments.tokens, moments.energies, None if inputs is None else inputs.squares
    )


@torch.inference_mode()
def _save_embeddings(offloaded: OffloadedModel, batches: Sequence[TokenBatch], outputs: LayerOutputs) -> None:
    embedding = offloaded.model.get_input_embeddings()
    path = next(path for path, module in offloaded.model.named_modules() if module is embedding)
    with offloaded.materialised(path):
        for number, batch in enumerate(batches):
            outputs.save_embeddings(number, embedding(batch.input_ids.to(offloaded.device)))


def _started(
    start: CalibrationProgress | None, energy: bool, input_squares: bool
) -> tuple[int, list[CalibrationProgress]]:
    """The layers that are done and their sums."""
    if start is None:
        return 0, []
    for name, asked, sums in (
        ("energies", energy, start.energies),
        ("input_squares", input_squares, start.input_squares),
    ):
        if asked and sums is None:
            raise ValueError(f"the sums to continue from have no {name}.")
    return start.batches, [start]


def _joined(sums: Sequence[CalibrationProgress], layers: int) -> CalibrationProgress:
    """The sums of all mixers done, on the CPU, `layers` decoder layers into the model."""

    def joined(name: str) -> Tensor | None:
        tensors = [each.tensors()[name].cpu() for each in sums if name in each.tensors()]
        return torch.cat(tensors, dim=1) if tensors else None

    grams, tokens = joined("grams"), joined("tokens")
    if grams is None or tokens is None:
        raise ValueError("no mixer's sums were taken")
    return CalibrationProgress(layers, grams, tokens, joined("energies"), joined("input_squares"))


def _position(mixer: Mixer) -> int:
    """Of its decoder layer in the list of them."""
    return int(block_of(mixer).rpartition(".")[2])
