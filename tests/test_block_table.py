"""The block table: rows of blocks, reference counts, and what `cache.block_table()` prints."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import torch
from hypothesis import given
from support import feed, small, store_of, tiny, tokens

import tieredkv
from tieredkv.block import Block
from tieredkv.block_table import BlockTable

BLOCK = 16


class Ledger:
    """Makes blocks and notes which were released."""

    def __init__(self) -> None:
        self.made: list[Block] = []
        self.released: list[int] = []
        self.tables: list[BlockTable] = []

    def table(self) -> BlockTable:
        self.tables.append(BlockTable(BLOCK, lambda block: self.released.append(block.id)))
        return self.tables[-1]

    def block(self) -> Block:
        self.made.append(Block(len(self.made)))
        return self.made[-1]

    def check(self) -> None:
        entries = Counter(b.id for table in self.tables for row in table for b in row)
        for block in self.made:
            assert block.refs == entries[block.id]
        assert sorted(self.released) == [b.id for b in self.made if not entries[b.id]], "freed once, at zero"


@given(st.data())
def test_a_block_is_released_once_and_at_zero(data: st.DataObject) -> None:
    ledger = Ledger()
    table = ledger.table()
    table.rows = [[], []]
    for _ in range(data.draw(st.integers(1, 25))):
        table = data.draw(st.sampled_from(ledger.tables))
        rows = len(table)
        choice = data.draw(st.sampled_from(["append", "truncate", "select", "fork", "replace", "clear"]))
        if choice == "append" and rows:
            table.append(data.draw(st.integers(0, rows - 1)), ledger.block())
        elif choice == "truncate":
            table.truncate(data.draw(st.integers(0, 3 * BLOCK)))
        elif choice == "select" and rows:
            table.select(data.draw(st.lists(st.integers(0, rows - 1), max_size=4)))
        elif choice == "fork" and len(ledger.tables) < 3:
            twin = table.fork()
            assert twin.rows == table.rows and twin.rows is not table.rows
            ledger.tables.append(twin)
        elif choice == "replace" and any(table.rows):
            row = data.draw(st.sampled_from([i for i, blocks in enumerate(table.rows) if blocks]))
            index = data.draw(st.integers(0, len(table.rows[row]) - 1))
            fresh = ledger.block()
            table.replace(row, index, fresh)
            assert table.rows[row][index] is fresh
        elif choice == "clear":
            table.clear()
            assert not table.rows
        ledger.check()


def test_truncate_keeps_the_block_that_is_cut() -> None:
    ledger = Ledger()
    table = ledger.table()
    table.rows = [[ledger.block() for _ in range(3)]]
    table.truncate(2 * BLOCK + 1)
    assert len(table.rows[0]) == 3
    table.truncate(2 * BLOCK)
    assert len(table.rows[0]) == 2
    table.truncate(0)
    assert table.rows == [[]]


def test_blocks_lists_each_once_in_order() -> None:
    ledger = Ledger()
    table = ledger.table()
    table.rows = [[ledger.block(), ledger.block()]]
    table.select([0, 0])
    assert [b.id for b in table.blocks()] == [0, 1]


def test_the_printed_table_says_where_every_block_is(cold_dir: Path) -> None:
    model = tiny()
    with small(model, cold_dir) as cache:
        feed(model, tokens(150, rows=2), cache, [120, 1])
        entries = cache.block_table()
        blocks = -(-150 // BLOCK)
        assert len(entries) == 2 * blocks * 2  # rows, blocks, layers
        assert {entry.layer_id for entry in entries} == {0, 1}
        assert {entry.location for entry in entries} == {"hot", "warm", "cold"}
        for row in (0, 1):
            ranges = [entry.token_range for entry in entries if entry.row == row and entry.layer_id == 0]
            assert ranges == [(start, min(start + BLOCK, 150)) for start in range(0, 150, BLOCK)]
        assert all(entry.ref_count == 1 and entry.last_access > 0 and entry.offset >= 0 for entry in entries)
        places = [(entry.location, entry.layer_id, entry.offset) for entry in entries]
        assert len(set(places)) == len(places), "two blocks at one offset"
        printed = json.loads(json.dumps([dataclasses.asdict(entry) for entry in entries]))
        assert printed[0] == {**dataclasses.asdict(entries[0]), "token_range": [0, BLOCK]}


def test_the_printed_offset_leads_to_the_bytes(cold_dir: Path) -> None:
    model = tiny()
    with small(model, cold_dir) as cache:
        feed(model, tokens(100), cache)
        store, checked = store_of(cache), 0
        for entry in cache.block_table():
            if entry.location == "cold":
                continue
            keys = cache.gather_layer(entry.layer_id)
            assert keys is not None
            first, last = entry.token_range
            planes = store.tiers[entry.location].run(entry.layer_id, 0, store.tiers[entry.location].slots.total)
            assert planes is not None
            head = planes[0][0].reshape(-1)  # the K plane's first head, [slots * block_size * dim]
            dim = keys[0].shape[-1]
            at = entry.offset // head.element_size()
            found = head[at : at + (last - first) * dim].view(-1, dim)
            assert torch.equal(found, keys[0][entry.row, 0, first:last])
            checked += 1
        assert checked


def test_shared_blocks_show_their_references(cold_dir: Path) -> None:
    model = tiny()
    with small(model, cold_dir) as cache:
        feed(model, tokens(40), cache)
        cache.batch_repeat_interleave(3)
        assert {entry.ref_count for entry in cache.block_table()} == {3}
        assert {entry.row for entry in cache.block_table()} == {0, 1, 2}


def test_access_is_the_caches_and_a_block_that_is_kept_has_one_reference_more() -> None:
    model, ids = tiny(), tokens(40)
    with tieredkv.KVStore(model, hot="512 tokens", warm=0, block_size=BLOCK, window=16) as store:
        with store.cache(ids) as first:
            feed(model, ids, first, [30, 1])
            assert {entry.ref_count for entry in first.block_table()} == {1}
            last = first.block_table()[0].last_access
            assert last > 0
        with store.cache(ids) as second:
            feed(model, ids[:, 32:], second, [1, 1])
            entries = [entry for entry in second.block_table() if entry.layer_id == 0]
            assert [entry.ref_count for entry in entries] == [2, 2, 1], "two are kept, the tail is not"
            assert len({entry.last_access for entry in entries}) == 1
            assert entries[0].last_access == store_of(second).forwards > last


def test_an_empty_cache_has_an_empty_table() -> None:
    assert small(tiny().config, None).block_table() == []
