"""Decode attention over a whole pool for many rows in one compiled call: FlexAttention with one block list per row.

KV heads are batch rows of the kernel and the heads of a group its queries, so the pool `[kv_heads, slots, block,
dim]` is seen without a copy as `[1, 1, kv_heads * slots * block, dim]`, and a block of one head is tile
`head * slots + slot`. Block lists and bounds are tensors that are updated in place once per forward and serve every
layer.

Imports: errors, tiers, kernels, lse, partials; torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from tieredkv.attention.kernels import FlexKernels, Result
from tieredkv.attention.lse import Partial, cat_rows, merge_partials
from tieredkv.attention.partials import over_run_parts
from tieredkv.errors import ConfigError, MismatchError
from tieredkv.tiers import runs

__all__ = ["FlexKernels", "FlexTiles", "TileRow", "rows_bucket"]

Q_BLOCK = 128
"""Queries per block of the block mask: one row's group times its query length must fit."""


class TileRow(NamedTuple):
    """One row's blocks.

    Args:
        slots: the slot of each of its blocks, in the order of the tokens; the last may be partly filled.
        tokens: how many tokens the blocks hold, the new ones included.
        start: the first token that is seen (left padding, or what a window has left behind).
    """

    slots: Sequence[int]
    tokens: int
    start: int = 0


class _Lists(NamedTuple):
    """What a row's block lists were made from; equal ones need no rewriting."""

    slots: list[int]
    first: int
    whole_start: int
    whole_stop: int


def rows_bucket(rows: int) -> int:
    """The number of rows a kernel is compiled for: the next power of two."""
    return 1 << max(rows - 1, 0).bit_length()


class FlexTiles:
    """Block lists of up to `rows` rows over one pool geometry, and the attention that reads them.

    Every slot that is listed must hold finite K and V in all its tokens, also behind the last one: a hidden token
    counts 0 times its value, and 0 times NaN is NaN. Slots that no row lists may hold anything.

    Args:
        kernels: the compiled callables, shared by all tiles of a process or cache.
        kv_heads: KV heads of the pool.
        pool_slots: slots of the pool.
        rows: how many rows may be in use; taken up to the next power of two, which is then `self.rows`.
        block_size: tokens per block.
        device: where the pool is.
        q_length: new tokens per row in each call, equal for all rows; they are the last of the row's tokens.

    Attributes:
        stale: for the owner to note whether `update` is due; not read here.
    """

    def __init__(
        self,
        kernels: FlexKernels,
        *,
        kv_heads: int,
        pool_slots: int,
        rows: int,
        block_size: int,
        device: torch.device,
        q_length: int = 1,
    ) -> None:
        self.kernels, self.device = kernels, device
        slots, rows = pool_slots, rows_bucket(rows)
        self.kv_heads, self.slots, self.rows = kv_heads, slots, rows
        self.block_size, self.q_length = block_size, q_length
        self.stale = True
        # The CPU searches its partial list once per block: only blocks with hidden tokens belong there. CUDA splits a
        # decode evenly only when there is no full list.
        self._use_whole = device.type == "cpu"
        host = torch.device("cpu")
        with torch.inference_mode(False):  # or an update outside inference mode could not write them
            self._host = _Arrays.zeros(rows, kv_heads, slots, host)
            self._arrays = self._host if device.type == "cpu" else _Arrays.zeros(rows, kv_heads, slots, device)
        self._numpy = _Arrays(*(tensor.numpy() for tensor in self._host))
        self._head_offsets: Any = torch.arange(0, kv_heads * slots, slots, dtype=torch.int32)[:, None].numpy()
        self._numbers: Any = torch.arange(slots, dtype=torch.int32).numpy()
        self._lists: list[_Lists | None] = [None] * rows
        self._in_use: list[TileRow] = []
        self._masks: dict[int, BlockMask] = {}

    def update(self, rows: Sequence[TileRow | tuple[Sequence[int], int, int]]) -> None:
        """Take over the blocks of a forward's rows; call once per forward, after its slots are chosen.

        Rows may share slots (a common prefix). Cheap when only the numbers of tokens changed.

        Raises:
            MismatchError: too many rows, a row without a visible token, a slot outside the pool or twice in a row.
        """
        if not 0 < len(rows) <= self.rows:
            raise MismatchError(
                "The rows do not fit the tiles.", wanted=f"1 to {self.rows} rows", got=len(rows), change="the bucket"
            )
        in_use = [TileRow(*row) for row in rows]
        changed = False
        # Rows of the bucket that are not in use read one block of the first row; their output is dropped.
        last = (in_use[0].tokens - 1) // self.block_size
        idle = TileRow(in_use[0].slots[last : last + 1], in_use[0].tokens - last * self.block_size)
        bounds = self._numpy.bounds
        for index in range(self.rows):
            row = in_use[index] if index < len(in_use) else idle
            lists = self._lists_of(row)
            if lists != self._lists[index]:
                self._write(index, lists)
                changed = True
            bounds[0, index] = row.start
            bounds[1, index] = row.tokens
        self._in_use = in_use
        if self._arrays is not self._host:
            self._upload(changed)

    def attend(self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, *, scale: float, lse: bool) -> Result:
        """Attention of each row's new tokens over the row's blocks, causal among the new ones.

        The result is valid when the pool's writes of this forward were ordered before the call on its stream.

        Args:
            q: `[rows in use, heads, q_length, k_dim]` in the pool's dtype.
            k_pool: `[kv_heads, slots, block_size, k_dim]`, contiguous.
            v_pool: `[kv_heads, slots, block_size, v_dim]`, contiguous.
            scale: factor on q·k.
            lse: whether the LSE is wanted too; see `FlexKernels.returns_lse`.

        Returns:
            out `[rows in use, heads, q_length, v_dim]` in q's dtype, and lse `[rows in use, heads, q_length]` in fp32
            if it was wanted and the device gives it, else None.
        """
        if q.shape[0] != len(self._in_use) or q.shape[2] != self.q_length:
            raise MismatchError(
                "The queries do not fit the rows.",
                wanted=f"{len(self._in_use)} rows of {self.q_length} tokens",
                got=tuple(q.shape),
                change="update the tiles with the rows of this forward first",
            )
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._attend(q, k_pool, v_pool, scale, lse)
        return self._attend(q, k_pool, v_pool, scale, lse)

    def _attend(self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, scale: float, lse: bool) -> Result:
        rows, heads, queries, k_dim = q.shape
        v_dim = v_pool.shape[3]
        packed_queries = heads // self.kv_heads * queries
        lse = lse and self.kernels.returns_lse(self.device)
        key = (
            *(self.device, q.dtype, self.kv_heads, packed_queries, queries, k_dim, v_dim, self.rows, self.slots),
            *(self.block_size, scale, lse, q.is_inference(), k_pool.is_inference(), torch.is_inference_mode_enabled()),
        )
        kernel = self.kernels.get(key, self.device, q.dtype, self.block_size, lse=lse)
        if kernel is None:
            return self._plain(q, k_pool, v_pool, scale, lse)
        # From two dimensions to four, so that strides are always the same ones.
        flat = q.reshape(-1, k_dim).contiguous()
        if rows < self.rows:
            flat = torch.nn.functional.pad(flat, (0, 0, 0, (self.rows - rows) * heads * queries))
        packed = flat.view(self.rows * self.kv_heads, 1, packed_queries, k_dim)
        k, v = k_pool.view(1, 1, -1, k_dim), v_pool.view(1, 1, -1, v_dim)
        try:
            out, out_lse = kernel(packed, k, v, self._mask(packed_queries), scale)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            self.kernels.drop(key, error)
            return self._plain(q, k_pool, v_pool, scale, lse)
        out = out.view(self.rows, heads, queries, v_dim)[:rows]
        return out, None if out_lse is None else out_lse.view(self.rows, heads, queries)[:rows]

    def _lists_of(self, row: TileRow) -> _Lists:
        slots, tokens, start = row
        size = self.block_size
        blocks = -(-tokens // size)
        if not 0 <= start < tokens or len(slots) < blocks:
            raise MismatchError(
                "A row sees no token, or has fewer blocks than its tokens fill.",
                wanted=f"0 <= start < tokens <= {len(slots)} blocks of {size}",
                got=f"start {start}, tokens {tokens}",
                change="give the row the blocks of all its tokens, the new ones included",
            )
        first = start // size
        if not self._use_whole:
            return _Lists(list(slots[:blocks]), first, blocks, blocks)
        # Whole: every query of the call sees every token. The last block never counts as whole, so the lists stay
        # as they are while it fills up.
        whole_start = -(-start // size)
        whole_stop = max(whole_start, min((tokens - self.q_length + 1) // size, blocks - 1))
        return _Lists(list(slots[:blocks]), first, whole_start, whole_stop)

    def _write(self, index: int, lists: _Lists) -> None:
        slots, first, whole_start, whole_stop = lists
        listed = slots[first:]
        if min(slots) < 0 or max(slots) >= self.slots or len(set(listed)) != len(listed):
            raise MismatchError(
                "A row's slots are not different slots of the pool.",
                wanted=f"different numbers from 0 to {self.slots - 1}",
                got=slots,
                change="the block table of the row",
            )
        self._lists[index] = lists
        arrays = self._numpy
        whole = slots[whole_start:whole_stop]
        cut = slots[first:whole_start] + slots[whole_stop:]
        heads = slice(index * self.kv_heads, (index + 1) * self.kv_heads)
        arrays.whole[heads, : len(whole)] = self._head_offsets + whole
        arrays.cut[heads, : len(cut)] = self._head_offsets + cut
        arrays.counts[0, heads] = len(whole)
        arrays.counts[1, heads] = len(cut)
        arrays.logical[index] = -1
        arrays.logical[index, listed] = self._numbers[first : len(slots)]

    def _upload(self, lists_changed: bool) -> None:
        # CUDA takes pageable memory along before it returns, so that it may be overwritten; of up to 64 KiB without a
        # wait for what the stream has to do before.
        self._arrays.bounds.copy_(self._host.bounds, non_blocking=True)
        if lists_changed:
            width = int(self._numpy.counts.max())
            self._arrays.cut[:, :width].copy_(self._host.cut[:, :width], non_blocking=True)
            self._arrays.counts.copy_(self._host.counts, non_blocking=True)
            self._arrays.logical.copy_(self._host.logical, non_blocking=True)

    def _mask(self, packed_queries: int) -> BlockMask:
        """The block mask over the tensors of these tiles: made once, the tensors change under it."""
        if packed_queries in self._masks:
            return self._masks[packed_queries]
        if packed_queries > Q_BLOCK:
            raise ConfigError(
                "Too many queries for one call over tiles.",
                wanted=f"at most {Q_BLOCK} (heads of a group times new tokens)",
                got=packed_queries,
                change="attend long stretches of new tokens with partials",
            )
        with torch.inference_mode(False):
            self._masks[packed_queries] = BlockMask.from_kv_blocks(
                self._counts(1),
                self._tiles(self._arrays.cut),
                full_kv_num_blocks=self._counts(0) if self._use_whole else None,
                full_kv_indices=self._tiles(self._arrays.whole) if self._use_whole else None,
                BLOCK_SIZE=(Q_BLOCK, self.block_size),
                mask_mod=self._mask_mod(),
                seq_lengths=(packed_queries, self.kv_heads * self.slots * self.block_size),
                compute_q_blocks=False,
            )
        return self._masks[packed_queries]

    def _mask_mod(self) -> Any:
        kv_heads, slots, size, queries = self.kv_heads, self.slots, self.block_size, self.q_length
        logical, (start, stop) = self._arrays.logical, self._arrays.bounds.unbind()

        def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            row, tile = b // kv_heads, kv // size
            position = logical[row, tile % slots] * size + kv % size  # negative in slots the row does not list
            end = stop[row] if queries == 1 else stop[row] - (queries - 1) + q % queries
            seen: torch.Tensor = (tile // slots == b % kv_heads) & (position >= start[row]) & (position < end)
            return seen

        return sees

    def _counts(self, which: int) -> torch.Tensor:
        counts: torch.Tensor = self._arrays.counts[which].view(-1, 1, 1)
        return counts

    def _tiles(self, lists: Any) -> torch.Tensor:
        """Lists as wide as the pool has tiles, as flex demands: a view whose rows reach into the following ones."""
        shape = (self.rows * self.kv_heads, 1, 1, self.kv_heads * self.slots)
        tiles: torch.Tensor = lists.as_strided(shape, (self.slots, self.slots, self.slots, 1))
        return tiles

    def _plain(self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, scale: float, lse: bool) -> Result:
        k, v = (pool.view(self.kv_heads, -1, pool.shape[3]) for pool in (k_pool, v_pool))
        partial = cat_rows([self._plain_row(q[i : i + 1], k, v, row, scale) for i, row in enumerate(self._in_use)])
        return partial.out.to(q.dtype), partial.lse if lse else None

    def _plain_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: TileRow, scale: float) -> Partial:
        size, seen_by_all = self.block_size, row.tokens - self.q_length + 1
        parts: list[Partial] = []
        for block, slot, count in runs(row.slots):
            low, high = max(row.start, block * size), min(row.tokens, (block + count) * size)
            if low >= high:
                continue
            keys = slice(slot * size + low - block * size, slot * size + high - block * size)
            bias = None
            if high > seen_by_all:
                ends = torch.arange(seen_by_all, row.tokens + 1, device=q.device)[:, None]
                bias = (torch.arange(low, high, device=q.device) < ends)[None, None]  # [1, 1, q, tokens]
            parts += over_run_parts(q, k[:, keys], v[:, keys], scale=scale, bias=bias)
        return merge_partials(parts)


class _Arrays(NamedTuple):
    """The tensors that kernels read, int32; the numpy views of their host copies have the same shape."""

    whole: Any  # [rows * kv_heads + kv_heads, slots], tiles that every query sees whole; the last rows are padding
    cut: Any  # the same for tiles of which some token is hidden
    counts: Any  # [2, rows * kv_heads], entries in use of whole and cut
    logical: Any  # [rows, slots], number of the block within the row, -1 where the row does not list the slot
    bounds: Any  # [2, rows], first token seen, and tokens

    @classmethod
    def zeros(cls, rows: int, kv_heads: int, slots: int, device: torch.device) -> _Arrays:
        """All lists empty."""
        lists = ((rows + 1) * kv_heads, slots)
        shapes = (lists, lists, (2, rows * kv_heads), (rows, slots), (2, rows))
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))
