"""The page in front of every value of a slab: it says whose bytes follow, so that others are found.

::

    0   magic "kvwslab1"  version u32  key bytes u32  xxh3(key)  seq  n_bytes  xxh3(payload)
    48  the key, then xxh3 of all before it, then zeros to 512      little-endian, u64 if not said
    512 anything
"""

from __future__ import annotations

import struct

import xxhash

MAGIC = b"kvwslab1"
VERSION = 1
SIZE = 512  # bytes of the page that mean something
_FIXED = struct.Struct("<8sIIQQQQ")
_SUM = struct.Struct("<Q")


def pack(key: str, seq: int, n_bytes: int, payload_sum: int) -> bytes:
    """Return the header of a value, ``SIZE`` bytes."""
    name = key.encode()
    hashed = xxhash.xxh3_64_intdigest(name)
    head = _FIXED.pack(MAGIC, VERSION, len(name), hashed, seq, n_bytes, payload_sum) + name
    return (head + _SUM.pack(xxhash.xxh3_64_intdigest(head))).ljust(SIZE, b"\0")


def fault(page: bytes, key: str, seq: int, n_bytes: int) -> str:
    """Return what is wrong with the header of a value that was stored as this one, or ""."""
    magic, version, n_name, hashed, found_seq, found_n, _ = _FIXED.unpack_from(page)
    if magic != MAGIC:
        return "there is no header"
    if version != VERSION:
        return f"its format is {version}, not {VERSION}"
    end = _FIXED.size + n_name
    if end + _SUM.size > SIZE or _SUM.unpack_from(page, end)[0] != xxhash.xxh3_64_intdigest(
        page[:end]
    ):
        return "its header is torn"
    if hashed != xxhash.xxh3_64_intdigest(key.encode()) or page[_FIXED.size : end] != key.encode():
        return f"it is {page[_FIXED.size : end].decode(errors='replace')!r}"
    if (found_seq, found_n) != (seq, n_bytes):
        return f"it is version {found_seq} of {found_n} bytes, not {seq} of {n_bytes}"
    return ""


def payload_sum(page: bytes) -> int:
    """Return the xxh3_64 of the payload that a header names."""
    found: int = _FIXED.unpack_from(page)[6]
    return found
