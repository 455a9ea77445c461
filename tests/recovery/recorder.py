"""What the operations of some code allocate and multiply."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Records the tensors that operations make.

    Attributes:
        largest: the most elements of one tensor.
        peak_bytes: of what was alive after some operation, tensors from before included once they are passed on.
        products, product_dtypes: of matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.peak_bytes = 0
        self.products = 0
        self.product_dtypes: set[torch.dtype] = set()
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                self._storages.add(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in self._storages))
        if func is torch.ops.aten.mm.default:
            self.products += 1
            self.product_dtypes.add(result.dtype)
        return result
