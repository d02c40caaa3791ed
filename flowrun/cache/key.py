"""Keys: 16-byte digests of plain data. No torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

KEY_BYTES = 16


def digest(*plain: Any) -> bytes:
    """128-bit hash of nested plain data: None, bool, int, float, str, bytes, lists, tuples, mappings.

    A list and a tuple of the same items are alike; the order of a mapping does not count. Other values
    of different types or nesting never share an encoding. Raises TypeError for anything else.
    """
    return blake2b(_encoded(plain), digest_size=KEY_BYTES).digest()


class Encoded(bytes):
    """Plain data as `digest` encodes them, and standing for them in it: what many digests share is encoded once."""


def encoded(plain: Any) -> Encoded:
    """Raises TypeError as `digest` does."""
    return Encoded(_encoded(plain))


def _encoded(plain: Any) -> bytes:
    """Type tag, length, content: no two values have one encoding."""
    kind = type(plain)
    if kind is str:
        return _tagged(b"s", plain.encode("utf-8", "surrogatepass"))
    if kind is Encoded:
        return plain
    if plain is None or kind is bool:
        return {None: b"n", True: b"t", False: b"f"}[plain]
    if kind is int:
        return _tagged(b"i", str(plain).encode())
    if kind is float:
        return b"d" + struct.pack(">d", plain)
    if kind is bytes:
        return _tagged(b"b", plain)
    if kind in (list, tuple):
        return _tagged(b"l", b"".join([_encoded(item) for item in plain]))
    if isinstance(plain, Mapping):
        return _tagged(b"m", b"".join(sorted(_encoded(key) + _encoded(value) for key, value in plain.items())))
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} is not plain data, so it cannot be part of a key: {plain!r:.80}"
    )


def _tagged(tag: bytes, content: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(content), content)
