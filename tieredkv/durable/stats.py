"""What a directory of published blocks has done so far.

Imports: nothing of the package.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class DurableStats:
    """Counts of one opened directory; `DurableBlocks.stats` returns a copy.

    Args:
        blocks: different blocks that are present.
        bytes_: bytes of their files, headers included.
        published: blocks written.
        read_bytes: bytes read.
        misses: reads refused because a block was gone, damaged or late.
        late: those of them that lasted longer than the deadline, and searches that did.
        set_aside: damaged files that were put into quarantine.
        foreign: files left alone: not to be read, or of another model, dtype, block size, codec, format or program.
        evicted: blocks deleted to make room or because their retention ended.
        failures: publications that the disk refused, in whole or in part.
        index_seconds: how long it took to read the headers at the start.
    """

    blocks: int = 0
    bytes_: int = 0
    published: int = 0
    read_bytes: int = 0
    misses: int = 0
    late: int = 0
    set_aside: int = 0
    foreign: int = 0
    evicted: int = 0
    failures: int = 0
    index_seconds: float = 0.0
