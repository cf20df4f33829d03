"""A file of tensors and one JSON value that is whole or absent: written beside, synced, renamed, closed by a digest.

The layout is that of safetensors, so that other tools can look inside. The last tensor is the SHA-256 of everything
before it. Tensors are written one after the other as they come, so that never all of them are in memory.

Imports: errors, files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import mmap
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tieredkv.errors import SessionError
from tieredkv.files import sync_folder, try_lock

FORMAT = "tieredkv.session"
VERSION = 1
_DIGEST = "sha256"
_LEAST_AGE_SECONDS = 60
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclasses.dataclass(frozen=True)
class Slot:
    """A tensor to be written: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: Path, content: dict[str, Any], slots: Sequence[Slot], tensors: Iterable[torch.Tensor]) -> None:
    """Write a file, readable by its owner alone; a file of that name is replaced once the new one is on the disk.

    Args:
        path: where; the folder must exist.
        content: what JSON can hold.
        slots: the tensors, those of larger elements first.
        tensors: one for each slot, in order, on any device.

    Raises:
        SessionError: a dtype that cannot be stored, or the disk refuses; nothing is left behind then, and what was at
            `path` is as it was.
    """
    header = _header(content, slots)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _sweep(path)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                _lock(file.fileno())
                digest = hashlib.sha256()
                for part in itertools.chain([header], _buffers(slots, tensors)):
                    digest.update(part)
                    _write_all(file.fileno(), memoryview(part))
                _write_all(file.fileno(), memoryview(digest.digest()))
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        sync_folder(path.parent)
    except OSError as cause:
        if isinstance(cause, SessionError):
            raise
        raise SessionError(
            f"The session cannot be written to {path}.",
            wanted="a folder that can be written, with room",
            got=cause,
            change="choose another place, or free some space",
        ) from cause


def _sweep(path: Path) -> None:
    """Remove what writers of this file left behind when they were killed: files that nobody holds locked."""
    pattern = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{16}")
    for left in [each for each in path.parent.iterdir() if pattern.fullmatch(each.name)]:
        with contextlib.suppress(FileNotFoundError), open(left, "rb") as file:
            # One that was made a moment ago may not be locked yet.
            if time.time() - os.fstat(file.fileno()).st_mtime > _LEAST_AGE_SECONDS and _lock(file.fileno()):
                left.unlink()


def _lock(descriptor: int) -> bool:
    """Hold a file until it is closed, if nobody else does; false also where there are no such locks."""
    try:
        return os.name == "posix" and try_lock(descriptor)
    except OSError:
        return False


def _header(content: dict[str, Any], slots: Sequence[Slot]) -> bytes:
    fields: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "version": str(VERSION), "content": json.dumps(content, sort_keys=True)}
    }
    start = 0
    for slot in (*slots, Slot(_DIGEST, torch.uint8, (32,))):
        if slot.dtype not in _NAMES:
            raise SessionError(
                f"A tensor of dtype {slot.dtype} cannot be stored.",
                wanted=", ".join(map(str, _NAMES)),
                got=slot.name,
                change="save the session of a model in one of these dtypes",
            )
        stop = start + slot.nbytes
        fields[slot.name] = {"dtype": _NAMES[slot.dtype], "shape": list(slot.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _buffers(slots: Sequence[Slot], tensors: Iterable[torch.Tensor]) -> Iterable[Any]:
    for slot, tensor in zip(slots, tensors, strict=True):
        if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
            raise ValueError(f"{slot} is not {tuple(tensor.shape)} {tensor.dtype}")
        if slot.nbytes:
            flat = tensor.detach().cpu().contiguous()
            # A single element may have any stride.
            yield flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class SessionFile:
    """A session file, mapped into memory, whose digest was found right.

    Args:
        path: the file.

    Raises:
        SessionError: it cannot be read, is no session, has another version, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size < 48:
                    raise self._damaged("it is too short")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as cause:
            if isinstance(cause, SessionError):
                raise
            raise SessionError(
                f"The session {path} cannot be read.", wanted="a session file", got=cause, change="check the path"
            ) from cause
        whole = memoryview(self._map)
        digest = hashlib.sha256(whole[:-32]).digest()
        if digest != bytes(whole[-32:]):
            raise self._damaged("its digest is another")
        self._data, self._fields = self._parse(whole)
        meta = self._fields.pop("__metadata__", {})
        if meta.get("format") != FORMAT or meta.get("version") != str(VERSION):
            raise SessionError(
                f"{path} is not a session of this version.",
                wanted=f"{FORMAT} {VERSION}",
                got=f"{meta.get('format')} {meta.get('version')}",
                change="load it with the version that wrote it",
            )
        self.content: dict[str, Any] = json.loads(meta["content"])

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor over the file's own memory, good as long as it is referred to; writes to it stay in memory.

        Raises:
            SessionError: there is none of that name.
        """
        field = self._fields.get(name)
        if field is None:
            raise self._damaged(f"the tensor {name} is missing")
        dtype, shape = _DTYPES[field["dtype"]], field["shape"]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        start = self._data + field["data_offsets"][0]
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    def _parse(self, whole: memoryview) -> tuple[int, dict[str, Any]]:
        length = struct.unpack("<Q", whole[:8])[0]
        try:
            fields = json.loads(bytes(whole[8 : 8 + length]))
        except ValueError as cause:
            raise self._damaged("its header cannot be read") from cause
        return 8 + length, fields

    def _damaged(self, why: str) -> SessionError:
        return SessionError(
            f"The session {self._path} is damaged.",
            wanted="the bytes that were written",
            got=why,
            change="prefill again; a file that was saved is whole, so look at the disk or whoever copied it",
        )
