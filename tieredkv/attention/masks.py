"""What a model's mask says, without a tensor as large as the context: `MaskSpec`, and `TensorMask` for a user's own.

Attention over blocks asks a mask for the keys at hand only (`bias`), or whether it is plain causal with padding on
the left (`is_causal`, `row_starts`) and needs none. Code that knows nothing of this uses a `MaskSpec` as if it were
the additive 4-D tensor, which is then made once.

Imports: torch only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

MaskFunction = Callable[..., torch.Tensor]
"""(row, head, query position, key position) to bool, on index tensors or on single indices."""

_MISSING_IS_NOT_DELEGATED = "__"
"""Prefix of names that are never looked up on the tensor: copy and pickle probe for them before there is one."""


@dataclasses.dataclass(frozen=True, eq=False)
class MaskSpec:
    """A mask as transformers' mask builders describe it.

    Where a tensor is expected it stands for `materialise()`: operators, `torch` functions, indexing and attributes
    all act on that tensor.

    Args:
        batch: rows.
        q_length: queries; query i is at position `q_offset + i`.
        kv_length: keys; key j is at position `kv_offset + j`.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: which key each query sees.
        padding: bool `[batch, positions]`, False where a key is padding; positions behind its end count as padding.
            None for no padding.
        use_vmap: whether `mask_function` takes single indices only.
        dtype: of the additive tensor.
        device: of all tensors.
        is_causal: `mask_function` is the plain causal one.
        to_sdpa: makes what transformers' SDPA would be given (None where it needs no mask).
    """

    batch: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int
    mask_function: MaskFunction
    padding: torch.Tensor | None
    use_vmap: bool
    dtype: torch.dtype
    device: torch.device
    is_causal: bool
    to_sdpa: Callable[[], torch.Tensor | None] | None = None

    def visible(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        """Which keys the queries see: bool `[batch, 1, q, kv]` for int64 positions `[q]` and `[kv]`."""
        rows = torch.arange(self.batch, device=self.device)
        heads = torch.zeros(1, dtype=torch.int64, device=self.device)
        shape = (self.batch, 1, len(q_positions), len(kv_positions))
        if self.use_vmap:
            # Imported where it is needed: it brings in all of dynamo.
            from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

            function = self.mask_function
            for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
                function = torch.vmap(function, in_dims=axes, out_dims=0)
            with TransformGetItemToIndex():  # or vmap cannot index a tensor with a single index
                seen = function(rows, heads, q_positions, kv_positions)
        else:
            seen = self.mask_function(
                rows[:, None, None, None], heads[None, :, None, None], q_positions[:, None], kv_positions
            )
        if self._padding is not None:
            seen = seen & self._padding[:, None, None, kv_positions]
        return seen.expand(shape)

    def bias(self, kv_positions: torch.Tensor) -> torch.Tensor:
        """Which of the keys at these positions the mask's own queries see: bool `[batch, 1, q_length, kv]`."""
        queries = torch.arange(self.q_offset, self.q_offset + self.q_length, device=self.device)
        return self.visible(queries, kv_positions)

    def row_starts(self) -> list[int] | None:
        """For each row how many positions from 0 on are padding, or None where padding is not on the left alone."""
        return self._starts

    def materialise_bool(self) -> torch.Tensor:
        """The whole mask, bool `[batch, 1, q_length, kv_length]`; made once."""
        return self._bool

    def materialise(self) -> torch.Tensor:
        """The whole mask, 0 where a key is seen and the dtype's least value elsewhere; made once."""
        return self._additive

    def sdpa(self) -> torch.Tensor | None:
        """The mask for `scaled_dot_product_attention`, None where it needs none; made once."""
        return self._sdpa

    @functools.cached_property
    def _padding(self) -> torch.Tensor | None:
        if self.padding is None:
            return None
        missing = self.kv_offset + self.kv_length - self.padding.shape[1]
        padding = self.padding.to(torch.bool)
        return torch.nn.functional.pad(padding, (0, missing)) if missing > 0 else padding

    @functools.cached_property
    def _starts(self) -> list[int] | None:
        if self._padding is None:
            return [0] * self.batch
        positions = self.kv_offset + self.kv_length
        padding = self._padding[:, :positions]
        starts = positions - padding.sum(1)
        left_only = padding == (torch.arange(positions, device=padding.device) >= starts[:, None])
        return [int(start) for start in starts.tolist()] if bool(left_only.all()) else None

    @functools.cached_property
    def _bool(self) -> torch.Tensor:
        return self.bias(torch.arange(self.kv_offset, self.kv_offset + self.kv_length, device=self.device))

    @functools.cached_property
    def _additive(self) -> torch.Tensor:
        least = torch.finfo(self.dtype).min
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(self._bool, zero, torch.full_like(zero, least))

    @functools.cached_property
    def _sdpa(self) -> torch.Tensor | None:
        return self.to_sdpa() if self.to_sdpa is not None else self._bool

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape, without making it."""
        return torch.Size((self.batch, 1, self.q_length, self.kv_length))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Torch functions get the tensor in place of the spec."""
        return func(*(_tensor(value) for value in args), **{k: _tensor(v) for k, v in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        """What the spec does not have, the tensor has."""
        if name.startswith(_MISSING_IS_NOT_DELEGATED):
            raise AttributeError(name)
        return getattr(self.materialise(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.materialise()[index]

    def __len__(self) -> int:
        return self.batch

    # Operators are looked up on the class, not through __getattr__.
    _OPERATORS: ClassVar[tuple[str, ...]] = (
        *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__", "__invert__"),
        *("__and__", "__or__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    )
    __hash__ = object.__hash__


def _delegate(name: str) -> Callable[..., Any]:
    def operator(self: MaskSpec, *others: Any) -> Any:
        return getattr(self.materialise(), name)(*(_tensor(other) for other in others))

    operator.__name__ = name
    return operator


for _name in MaskSpec._OPERATORS:
    setattr(MaskSpec, _name, _delegate(_name))


def _tensor(value: Any) -> Any:
    """The value with every spec in it replaced by its tensor; torch functions take specs in lists too."""
    if isinstance(value, MaskSpec):
        return value.materialise()
    if isinstance(value, list | tuple) and any(isinstance(item, MaskSpec) for item in value):
        return type(value)(_tensor(item) for item in value)
    return value


@dataclasses.dataclass(frozen=True, eq=False)
class TensorMask:
    """A 4-D mask that the user gave, read by columns.

    Args:
        tensor: bool (True: seen) or additive, `[1 or batch, 1 or heads, q, kv]`; column j is the key at position j.
    """

    tensor: torch.Tensor

    @property
    def kv_length(self) -> int:
        """How many keys the mask knows."""
        return self.tensor.shape[3]

    def bias(self, kv_positions: torch.Tensor) -> torch.Tensor:
        """The columns of these positions: bool, or additive with -inf for what the mask hides altogether."""
        columns = self.tensor.index_select(3, kv_positions)
        if columns.dtype == torch.bool:
            return columns
        # Masks hide with the least finite value; left so, a query that sees nothing would average over everything.
        return columns.masked_fill(columns <= torch.finfo(columns.dtype).min, -torch.inf)
