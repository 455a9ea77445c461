"""Channels removed greedily by a quadratic model of the loss in their masks. Works in float64.

A mask m multiplies the channels; removing channel i changes m_i by delta_i = -1. Around the present masks

    loss(m + delta) = loss(m) + g^T delta + delta^T F delta / 2

so that removing i adds -g_i + F_ii / 2, after which the gradient is g - F[:, i]; bringing i back adds g_i + F_ii / 2,
after which it is g + F[:, i]. Each step is the best single one of this model, which is exact for a quadratic loss.

Source: LeCun, Denker, Solla, "Optimal Brain Damage" (1989), for the second-order model of a removal; Kwon et al., "A
Fast Post-Training Pruning Framework for Transformers" (arXiv:2204.09656), for masks whose Fisher matrix stands for the
Hessian. Uniform damping, F + lambda I, would add the same to every removal and so change nothing: `shrunk` does not.

Notation used for tensor shapes:
    P   problems that are solved on their own      G   heads of one problem, each of which keeps as many channels
    d   channels of one head                       D   channels of one problem, G * d, head by head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import RequestError
from compressor.selection.request import check_keep


@dataclass(frozen=True, slots=True, eq=False)
class MaskModel:
    """The quadratic model of P problems, and the masks it is taken around.

    Attributes:
        gradient: float64 [P, G, d], of the loss to the masks, those of removed channels too.
        fisher: float64 [P, D, D], symmetric.
        kept: bool [P, G, d], as many true in every head.
        change: float64 [P], what the steps so far add to the loss, by the model.
        steps: int64 [P], how many there were; a swap is one.
    """

    gradient: Tensor
    fisher: Tensor
    kept: Tensor
    change: Tensor
    steps: Tensor

    @property
    def width(self) -> int:
        """Channels that each head keeps."""
        return int(self.kept[0, 0].sum())


def mask_model(gradient: Tensor, fisher: Tensor, kept: Tensor) -> MaskModel:
    """The model before any step.

    Raises:
        ValueError: shapes or dtypes are not those of `MaskModel`, or heads keep different numbers of channels.
    """
    problems, heads, width = gradient.shape
    shapes = (fisher.shape, kept.shape) == ((problems, heads * width, heads * width), gradient.shape)
    if not shapes or (gradient.dtype, fisher.dtype, kept.dtype) != (torch.float64, torch.float64, torch.bool):
        raise ValueError(
            f"gradient {list(gradient.shape)}, fisher {list(fisher.shape)} and kept {list(kept.shape)} of "
            f"{gradient.dtype}, {fisher.dtype} and {kept.dtype} are not [P, G, d], [P, G * d, G * d] and [P, G, d]."
        )
    if len(kept.sum(-1).unique()) != 1:
        raise ValueError(f"heads keep {kept.sum(-1).unique().tolist()} channels; all must keep as many.")
    zeros = gradient.new_zeros(problems)
    return MaskModel(gradient, fisher, kept, zeros, zeros.long())


def stage_widths(width: int, keep: int, stages: int) -> tuple[int, ...]:
    """Widths after each stage, from below `width` down to `keep`: each removes the same share of what is left.

    There are fewer than `stages` where that would remove less than one channel. Raises RequestError when `keep` is
    outside [1, width] or `stages` is below 1.
    """
    check_keep(keep, width)
    if stages < 1:
        raise RequestError(f"{stages} stages were asked for and at least 1 is needed to remove a channel; give more.")
    widths = [round(width * (keep / width) ** (stage / stages)) for stage in range(1, stages + 1)]
    return tuple(dict.fromkeys(step for step in widths if step < width))


def shrunk(fisher: Tensor, shrinkage: float) -> Tensor:
    """[P, D, D] with its entries beside the diagonal multiplied by 1 - `shrinkage`: the noise of few samples is there.

    Source: Ledoit, Wolf, "A well-conditioned estimator for large-dimensional covariance matrices" (2004), with the
    diagonal as target.
    """
    return (1 - shrinkage) * fisher + shrinkage * torch.diag_embed(fisher.diagonal(dim1=1, dim2=2))


def removed(model: MaskModel, keep: int) -> MaskModel:
    """The model after removing channels greedily until every head keeps `keep`. Raises RequestError for another."""
    check_keep(keep, model.width)
    gradient, kept = model.gradient.clone(), model.kept.clone()
    change = model.change.clone()
    problems, heads, width = gradient.shape
    rows = torch.arange(problems, device=gradient.device)
    half_diagonal = model.fisher.diagonal(dim1=1, dim2=2).reshape(gradient.shape) / 2
    steps = heads * (model.width - keep)
    for _ in range(steps):
        removable = kept & (kept.sum(-1, keepdim=True) > keep)
        costs = torch.where(removable, half_diagonal - gradient, torch.inf).flatten(1)
        least, channel = costs.min(dim=1)
        change += least
        kept.view(problems, -1)[rows, channel] = False
        gradient -= model.fisher[rows, channel].view(problems, heads, width)
    return MaskModel(gradient, model.fisher, kept, change, model.steps + steps)


def swapped(model: MaskModel, limit: int, least_gain: float = 0.0) -> MaskModel:
    """The model after exchanging kept for removed channels of the same head, best first, while that pays.

    At most `limit` exchanges a problem; each lowers the model's loss by more than `least_gain`.
    """
    gradient, kept = model.gradient.clone(), model.kept.clone()
    change, steps = model.change.clone(), model.steps.clone()
    problems, heads, width = gradient.shape
    rows = torch.arange(problems, device=gradient.device)
    blocks = model.fisher.view(problems, heads, width, heads, width).diagonal(dim1=1, dim2=3).movedim(-1, 1)
    half_diagonal = blocks.diagonal(dim1=2, dim2=3) / 2
    for _ in range(limit):
        out = torch.where(kept, half_diagonal - gradient, torch.inf)
        back = torch.where(kept, torch.inf, half_diagonal + gradient)
        costs = out[..., :, None] + back[..., None, :] - blocks  # [P, G, out, back]
        least, pair = costs.flatten(1).min(dim=1)
        pays = least < -least_gain
        if not bool(pays.any()):
            break
        head, leaving, entering = pair // width**2, pair // width % width, pair % width
        kept[rows[pays], head[pays], leaving[pays]] = False
        kept[rows[pays], head[pays], entering[pays]] = True
        step = model.fisher[rows, head * width + entering] - model.fisher[rows, head * width + leaving]
        gradient += torch.where(pays[:, None], step, 0.0).view(gradient.shape)
        change += torch.where(pays, least, 0.0)
        steps += pays
    return MaskModel(gradient, model.fisher, kept, change, steps)


def kept_indices(kept: Tensor) -> Tensor:
    """int64 [N, keep], ascending, of bool [..., d] with `keep` true in each row; N rows in their order."""
    flat = kept.flatten(0, -2)
    return flat.nonzero()[:, 1].view(len(flat), -1)
