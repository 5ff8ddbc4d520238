"""Text to token ids and back: bytes, `tokenizer.json` files, tiktoken rank files with the K3 special tokens.

Every tokenizer encodes plain text only: whatever a document says, no special token comes out of it
(docs/k3.md section 3.9). Special ids are placed by the code that builds rows or chats.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer.

    Attributes:
        name: short identity for logs and for the data fingerprint.
        vocab_size: ids run from 0 to vocab_size - 1; the model's vocabulary must be at least this large.
        eos_id: closes every document in pretraining rows; None: nothing closes it.
        bos_id, pad_id: None where the tokenizer has none.
        stop_ids: ids that end generation.
    """

    name: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens] of plain text, no special ids."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of several texts, in parallel where the library can."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255, end of document 256, padding 257: 258 ids."""

    name = "byte"
    vocab_size = 258
    eos_id: int | None = 256
    bos_id: int | None = None
    pad_id: int | None = 257
    stop_ids: tuple[int, ...] = (256,)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer named by `data.tokenizer`.

    Raises:
        ValueError: the spec names nothing that can be loaded.
    """
    if spec == "byte":
        return ByteTokenizer()
    raise ValueError(f"data.tokenizer={spec!r}: expected byte")
