"""Replays a trace of requests on two tiers of blocks, and counts which prompt blocks would not have been computed.

Imports: errors, and this package.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tieredkv.errors import ConfigError
from tieredkv.eviction import DEFAULT_POLICY, EvictionPolicy, policy
from tieredkv.eviction.traces import Request, parents_of


@dataclass(frozen=True)
class Replayed:
    """What a replay counted, in blocks.

    Args:
        policy: name of the eviction policy of both tiers.
        hot_blocks: blocks that fit in hot.
        cold_blocks: blocks that fit in cold.
        prompt_blocks: blocks of all prompts.
        hot_hits: blocks of the prompts' longest known prefixes that were in hot.
        cold_hits: those that were in cold only.
        cold_writes: blocks written to cold.
    """

    policy: str
    hot_blocks: int
    cold_blocks: int
    prompt_blocks: int
    hot_hits: int
    cold_hits: int
    cold_writes: int

    @property
    def hit_rate(self) -> float:
        """Share of all prompt blocks that were known, in either tier."""
        return (self.hot_hits + self.cold_hits) / self.prompt_blocks


def distinct_blocks(requests: Sequence[Request]) -> int:
    """How many blocks a store would need to forget nothing."""
    return len({block for request in requests for block in request.blocks})


def replay(
    requests: Sequence[Request], policy_name: str = DEFAULT_POLICY, *, hot_blocks: int, cold_blocks: int = 0
) -> Replayed:
    """Serve requests one after the other, each with all blocks of its prompt; answers are not kept.

    A request hits the blocks of its prompt up to the first that is in neither tier. Then all of its blocks are brought
    to hot, first to last, and what has to leave hot for them goes to cold unless a copy is there already; blocks that
    do not fit in hot beside the rest of their own request go to cold at once. A block read from cold keeps its copy.

    Raises:
        ConfigError: a capacity is negative, the policy is unknown, or the trace does not name prefixes.
    """
    if hot_blocks < 0 or cold_blocks < 0:
        got = f"hot {hot_blocks}, cold {cold_blocks}"
        raise ConfigError("A tier has negative room.", wanted="0 or more blocks", got=got, change="pass 0 for no tier")
    parents = parents_of(requests)
    hot = _Tier(hot_blocks, policy(policy_name), parents)
    cold = _Tier(cold_blocks, policy(policy_name), parents)
    hot_hits = cold_hits = 0
    for request in requests:
        known = list(itertools.takewhile(lambda block: block in hot.policy or block in cold.policy, request.blocks))
        in_hot = sum(block in hot.policy for block in known)
        hot_hits += in_hot
        cold_hits += len(known) - in_hot
        for tier in (hot, cold):
            for block in reversed(known):
                if block in tier.policy:
                    tier.policy.touch(block)
        _bring_to_hot(request.blocks, hot, cold)
    prompt_blocks = sum(len(request.blocks) for request in requests)
    return Replayed(policy_name, hot_blocks, cold_blocks, prompt_blocks, hot_hits, cold_hits, cold.writes)


class _Tier:
    """Blocks that fit, and the policy that says which one goes."""

    def __init__(self, capacity: int, policy: EvictionPolicy[Any], parents: Mapping[int, int | None]) -> None:
        self.capacity, self.policy, self.writes = capacity, policy, 0
        self._parents = parents

    def put(self, block: int, in_use: Callable[[int], bool]) -> list[int] | None:
        """Take a block in; what went for it, or None if there was no room and nothing that could go."""
        gone: list[int] = []
        if len(self.policy) >= self.capacity:
            victim = self.policy.victim(in_use)
            if victim is None:
                return None
            self.policy.remove(victim)
            gone.append(victim)
        self.policy.insert(block, self._parents[block])
        self.writes += 1
        return gone


def _bring_to_hot(path: Sequence[int], hot: _Tier, cold: _Tier) -> None:
    in_use = set(path).__contains__
    for block in path:
        if block in hot.policy:
            continue
        gone = hot.put(block, in_use)
        for down in [block] if gone is None else gone:
            if down not in cold.policy:
                cold.put(down, in_use)
