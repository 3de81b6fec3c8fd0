"""A checkpoint is one safetensors file with a JSON header and a checksum: no pickle, there whole or not at all, and right or refused.

The checksum is in the file's metadata: the BLAKE2b digest of the whole file, read with zeros in place of the digest. So it covers the data,
the header, and what safetensors itself writes about names, dtypes, shapes and offsets. Version 1 had none.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gossamer.errors import GossamerError


class Unreadable(GossamerError):
    """Not there, damaged, or of another version."""


FORMAT = "gossamer-checkpoint-2"
_VERSION_1 = "gossamer-checkpoint-1"
_METADATA = {_VERSION_1: {"format", "header"}, FORMAT: {"format", "header", "digest"}}
_BLANK = "0" * 64
# A quotation mark inside of a JSON string has a backslash before it, so this is a key and its value, never a part of a text.
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"')
_HEADER_BYTES = 100_000_000  # safetensors takes no longer header
_PIECE_BYTES = 1 << 20
_DTYPES = {  # as safetensors calls them
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}


def save(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    write(path, tensors, metadata(header))


def metadata(header: dict[str, Any]) -> dict[str, str]:
    """Of a checkpoint. What JSON can't hold is refused."""
    return {"format": FORMAT, "header": _json(header)}


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file with a checksum. It is written beside ``path`` and moved there in one step, so a crash leaves the old file or
    the new one; when this returns, the disk has both the file and its name."""
    name = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        _make(path.parent)
        with open(name, "wb") as file:
            _write(file, tensors, metadata)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
        sync(path.parent)
    except GossamerError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise GossamerError(f"the checkpoint {path} can't be written: {_line(error)}; the one before it is kept") from None
    finally:
        name.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header, after the checksum was found right."""
    if not path.is_file():
        raise Unreadable(f"there is no checkpoint at {path}")
    with _damage(f"{path} is damaged or not a checkpoint"), open(path, "rb") as file:
        header = _header(file, str(path))
        with safetensors.safe_open(path, framework="pt") as content:
            # Copied: get_tensor() maps the file into memory, and what happens to it later would happen to the optimizer's state.
            return {key: content.get_tensor(key).clone() for key in content.keys()}, header  # noqa: SIM118  (not a dict)


def verify(path: Path) -> None:
    """Refuses a safetensors file that was changed since :func:`write` has written it, such as an averaged model."""
    with _damage(f"{path} is damaged"), open(path, "rb") as file:
        _check_digest(file)


def dumps(tensors: dict[str, Tensor], header: dict[str, Any]) -> bytes:
    """The same as bytes, to be sent."""
    file = io.BytesIO()
    _write(file, tensors, metadata(header))
    return file.getvalue()


def loads(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with _damage("the state that was sent is damaged"):
        header = _header(io.BytesIO(data), "the state that was sent")
        return safetensors.torch.load(data), header


def remove(path: Path) -> None:
    """A checkpoint, or a folder of them."""
    if path.is_dir():
        with contextlib.suppress(OSError):  # another process may be at it, or done with it
            for file in path.iterdir():
                file.unlink(missing_ok=True)
            path.rmdir()
    else:
        path.unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """A damaged checkpoint, or a folder of them, is kept under another name, which is returned."""
    names = (path.with_name(f"{path.name}.damaged{f'-{k}' if k else ''}") for k in range(1000))
    free = next(name for name in names if not name.exists())
    with contextlib.suppress(FileNotFoundError):  # another process has done it
        path.rename(free)
    return free


# --- Underneath ---------------------------------------------------------------------------------------------------------------


def _header(file: BinaryIO, where: str) -> dict[str, Any]:
    """The JSON header of a checkpoint, if the file is right."""
    length = int.from_bytes(file.read(8), "little")
    metadata = json.loads(file.read(min(length, _HEADER_BYTES))).get("__metadata__", {})
    kind = metadata.get("format")
    if kind not in _METADATA:
        raise Unreadable(f"{where} is not a checkpoint that this Gossamer reads ({FORMAT})")
    if set(metadata) != _METADATA[kind]:  # so that no damage turns version 2 into version 1, which nothing protects
        raise ValueError(f"its metadata are {', '.join(sorted(metadata))}")
    if kind == FORMAT:
        _check_digest(file)
    header = json.loads(metadata["header"])
    if not isinstance(header, dict) or (kind == _VERSION_1 and "parts" in header):
        raise ValueError("its header makes no sense")
    return header


def _digest(file: BinaryIO) -> tuple[int, str, str]:
    """Where the digest is, what it is, and what it should be."""
    file.seek(0)
    start = file.read(8)
    header = file.read(min(int.from_bytes(start, "little"), _HEADER_BYTES))
    places = list(_DIGEST.finditer(header))
    if len(places) != 1:
        raise ValueError("it has no checksum")
    begin, end = places[0].span(1)
    digest = hashlib.blake2b(digest_size=32)
    for piece in (start, header[:begin], _BLANK.encode(), header[end:]):
        digest.update(piece)
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return len(start) + begin, places[0][1].decode(), digest.hexdigest()


def _check_digest(file: BinaryIO) -> None:
    _, there, right = _digest(file)
    if there != right:
        raise ValueError("its checksum is wrong")


def _write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """In pieces that let other threads run, and hashed as they are written. The widest numbers come first, so that all are aligned."""
    header: dict[str, Any] = {"__metadata__": {**metadata, "digest": _BLANK}}
    order, end = sorted(tensors, key=lambda key: -tensors[key].element_size()), 0
    for key in order:
        tensor, start = tensors[key], end
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"tensor {key!r} is {tensor.dtype}, which safetensors does not have")
        end += tensor.numel() * tensor.element_size()
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (found,) = _DIGEST.finditer(text)
    digest = hashlib.blake2b(digest_size=32)
    for piece in _pieces(text, [tensors[key] for key in order]):
        digest.update(piece)
        file.write(piece)
    file.seek(8 + found.start(1))
    file.write(digest.hexdigest().encode())


def _pieces(text: bytes, tensors: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        flat = flat.as_strided((flat.numel(),), (1,))  # a single number may have a stride of 0
        data = flat.view(torch.uint8).numpy().data
        for start in range(0, len(data), _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES]


@contextlib.contextmanager
def _damage(what: str) -> Iterator[None]:
    """Bytes from a disk or a network can be anything, and so can be the error that they lead to: here it becomes one line."""
    try:
        yield
    except (GossamerError, MemoryError):
        raise
    except Exception as error:
        raise Unreadable(f"{what}: {_line(error)}") from None


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _json(header: dict[str, Any]) -> str:
    try:
        return json.dumps(header)
    except (TypeError, ValueError, RecursionError) as error:
        raise GossamerError(
            f"a state_dict holds what a checkpoint can't: {_line(error)}; it takes tensors, numbers and text"
        ) from None


def _make(folder: Path) -> None:
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(folder: Path) -> None:
    """The names in a folder are on disk only after this: a power cut could take a new file away, or bring the old one back.
    Windows can't open a folder."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some network file systems have no such thing
            raise
    finally:
        os.close(descriptor)
