"""Keys: 16-byte digests of plain data. No torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

KEY_BYTES = 16


class Encoded(bytes):
    """Plain data as it stands in what is hashed: made once where many digests hold the same."""

    @classmethod
    def of(cls, plain: Any) -> Encoded:
        """Raises TypeError as `digest` does."""
        return cls(_encoded(plain))


def digest(*plain: Any) -> bytes:
    """128-bit hash of nested plain data: None, bool, int, float, str, bytes, lists, tuples, mappings.

    A list and a tuple of the same items are alike; the order of a mapping does not count. Other values
    of different types or nesting never share an encoding. Raises TypeError for anything else.
    """
    return blake2b(_encoded(plain), digest_size=KEY_BYTES).digest()


def _encoded(plain: Any) -> bytes:
    """Type tag, length, content: no two values have one encoding."""
    kind = type(plain)
    if kind is str:
        text = plain.encode("utf-8", "surrogatepass")
        return b"s%d:%b" % (len(text), text)
    if kind is bytes:
        return b"b%d:%b" % (len(plain), plain)
    if kind is Encoded:
        return plain
    if plain is None or kind is bool:
        return {None: b"n", True: b"t", False: b"f"}[plain]
    if kind is int:
        digits = b"%d" % plain
        return b"i%d:%b" % (len(digits), digits)
    if kind is float:
        return b"d" + struct.pack(">d", plain)
    if kind in (list, tuple):
        items = b"".join(map(_encoded, plain))
        return b"l%d:%b" % (len(items), items)
    if isinstance(plain, Mapping):
        pairs = b"".join(sorted(_encoded(key) + _encoded(value) for key, value in plain.items()))
        return b"m%d:%b" % (len(pairs), pairs)
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} is not plain data, so it cannot be part of a key: {plain!r:.80}"
    )
