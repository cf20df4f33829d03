"""Who a published block belongs to, and what is known of it.

Imports: errors, block, tiers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from functools import cached_property
from itertools import accumulate

from tieredkv.block import Plane
from tieredkv.errors import MismatchError
from tieredkv.tiers import row_bytes
from tieredkv.tiers.cold_layout import spill_metadata

FORMAT = "tieredkv.durable"
FORMAT_VERSION = 1

_HASH = re.compile(r"[0-9a-f]{64}")
_SALT = re.compile(r"(?:[0-9a-f]{2})*")


@dataclasses.dataclass(frozen=True)
class Identity:
    """What all blocks must agree on to be of use to one store; files of another identity count as absent.

    Args:
        fingerprint: identifies the model: weights, dtype, rope settings.
        layers: for each tiered layer the planes of a block as stored.
        block_size: tokens of a full block.
        codec: name of the codec that made the planes.
    """

    fingerprint: str
    layers: tuple[tuple[Plane, ...], ...]
    block_size: int
    codec: str

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of one block in each layer."""
        return tuple(row_bytes(planes) for planes in self.layers)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Bytes of one block in the layers before each layer, and at the end in all."""
        return tuple(accumulate(self.row_bytes, initial=0))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.starts[-1]

    @cached_property
    def metadata(self) -> dict[str, str]:
        """What each file says of its identity, the format's version included."""
        geometry = spill_metadata(
            self.layers, block_size=self.block_size, codec=self.codec, fingerprint=self.fingerprint
        )
        return geometry | {"format": FORMAT, "format_version": str(FORMAT_VERSION)}

    def digest(self) -> str:
        """64 hex digits that differ when anything here or the format's version differs."""
        return hashlib.sha256(json.dumps(self.metadata, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class BlockRecord:
    """What is known of one published block.

    Args:
        hash: 64 hex digits, chained SHA-256 of the prefix up to and including this block.
        parent: hash of the block before, "" for the first of a sequence.
        tokens: tokens it holds.
        salt: hex digest that names the owner, "" for none; it is already mixed into `hash`.
        checksums: for each layer the checksum of its bytes as stored (int64).
    """

    hash: str
    parent: str
    tokens: int
    salt: str
    checksums: tuple[int, ...]

    def check(self, identity: Identity) -> None:
        """Refuse a record that cannot be of a block of `identity`.

        Raises:
            MismatchError: a hash, the salt, the tokens or the number of checksums cannot be.
        """
        is_good = (
            _HASH.fullmatch(self.hash)
            and (not self.parent or _HASH.fullmatch(self.parent))
            and _SALT.fullmatch(self.salt)
            and 0 < self.tokens <= identity.block_size
            and len(self.checksums) == len(identity.layers)
        )
        if not is_good:
            raise MismatchError(
                "This is not the record of a block of this store.",
                wanted=f"hashes of 64 hex digits, a hex salt, 1 to {identity.block_size} tokens and "
                f"{len(identity.layers)} checksums",
                got=self,
                change="publish sealed blocks of a cache of this store",
            )


def salt_digest(salt: str) -> str:
    """The digest that stands for a salt in names and headers; "" for no salt."""
    return hashlib.sha256(salt.encode()).hexdigest() if salt else ""
