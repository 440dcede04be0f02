"""Hash of a picture's data, kept in the picture: a test compares it with the data of today."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from .results import Results

KEY: Final = "Data"
_SIGNATURE: Final = 8
_AROUND_A_CHUNK: Final = 12


def of_text(text: str) -> str:
    """Hash a text, such as that of a JSON file."""
    return hashlib.sha256(text.encode()).hexdigest()


def of_results(drawn: Iterable[Results]) -> str:
    """Hash all that was measured in some workloads."""
    return of_text(json.dumps({results.name: [results.runs, results.missing] for results in drawn}, sort_keys=True))


def read(path: Path) -> str | None:
    """Return the hash that a PNG file holds, or None."""
    data, at = path.read_bytes(), _SIGNATURE
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        key, _, value = data[at + 8 : at + 8 + length].partition(b"\0")
        if kind == b"tEXt" and key == KEY.encode():
            return value.decode("latin-1")
        at += length + _AROUND_A_CHUNK
    return None
