"""Bracketed modular arithmetic: read an expression such as ((2*(-3))-4)=, say its value modulo m at the "=".

Source: the task of Deletang et al., "Neural Networks and the Chomsky Hierarchy" (arXiv:2207.02098), in the
set-up of Grazzi et al. (arXiv:2411.12537): modulus 5, trained at lengths 3 to 40, tested at 40 to 256, two
layers of width 128 with 4 heads, batches of 256, learning rate 1e-3, weight decay 0.1, 100,000 steps. Their
published generator leaves out multiplication unless told otherwise. Here a length counts the expression
and the "=": what the model reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from compressor.errors import RequestError
from compressor.evaluation.state_tracking.base import IGNORED, LabelledBatch, StateTrackingTask

OPERATORS = ("+", "-", "*")
_SYMBOLS = (*OPERATORS, "(", ")", "=", " ")
"""Tokens after the digits; the last one pads."""
_SHORTEST_OPERATION = 5
"""Tokens of (a+b)."""


@final
class ModularArithmetic(StateTrackingTask):
    """Tokens are the digits 0 .. modulus - 1, then + - * ( ) = and padding; classes are the digits.

    An expression of 1 to 4 tokens is d, -d, (d) or (-d). A longer one is (left operator right), where the
    length of `left`, the operator and every digit are uniform. With "*" the value 0 is more frequent than others.

    Raises:
        RequestError: the modulus is not 2 to 10, so that a digit is one character, or an operator is unknown.
    """

    minimum_length = 2

    def __init__(self, name: str, modulus: int = 5, operators: tuple[str, ...] = OPERATORS) -> None:
        if not 2 <= modulus <= 10:
            raise RequestError(f"modulus {modulus} is not supported; give 2 to 10.")
        if not operators or not set(operators) <= set(OPERATORS):
            raise RequestError(f"operators {operators} are not supported; give some of {OPERATORS}.")
        self.name = name
        self.modulus = self.num_classes = modulus
        self.operators = operators
        self.symbols = (*map(str, range(modulus)), *_SYMBOLS)
        self.vocab_size = len(self.symbols)
        self._token = {symbol: token for token, symbol in enumerate(self.symbols)}

    def text(self, tokens: Tensor) -> str:
        """tokens int64 [T]; without padding."""
        return "".join(self.symbols[token] for token in tokens.tolist()).rstrip()

    def _draw(self, lengths: Tensor, longest: int, generator: torch.Generator) -> LabelledBatch:
        # No expression takes more choices than it has tokens.
        choices = torch.rand(len(lengths), longest, dtype=torch.float64, generator=generator)
        tokens = torch.full((len(lengths), longest), self._token[" "])
        labels = torch.full((len(lengths), longest), IGNORED)
        for row, (length, row_choices) in enumerate(zip(lengths.tolist(), choices.tolist(), strict=True)):
            symbols, value = self._expression(length - 1, iter(row_choices))
            tokens[row, :length] = torch.tensor([self._token[symbol] for symbol in (*symbols, "=")])
            labels[row, length - 1] = value
        return LabelledBatch(tokens, labels)

    def _expression(self, length: int, choices: Iterator[float]) -> tuple[list[str], int]:
        """Symbols and value modulo m; `choices` are uniform on [0, 1)."""
        if length < _SHORTEST_OPERATION:
            digit = int(next(choices) * self.modulus)
            sign, value = (["-"], -digit % self.modulus) if length % 2 == 0 else ([], digit)
            symbols = [*sign, str(digit)]
            return ["(", *symbols, ")"] if length > 2 else symbols, value
        left_length = 1 + int(next(choices) * (length - 4))
        operator = self.operators[int(next(choices) * len(self.operators))]
        left, a = self._expression(left_length, choices)
        right, b = self._expression(length - 3 - left_length, choices)
        value = a + b if operator == "+" else a - b if operator == "-" else a * b
        return ["(", *left, operator, *right, ")"], value % self.modulus
