"""Text to token ids and back: bytes, `tokenizer.json` files, tiktoken rank files with the K3 special tokens.

Every tokenizer encodes plain text only: whatever a document says, no special token comes out of it
(docs/k3.md section 3.9). Special ids are placed by the code that builds rows or chats.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer.

    Attributes:
        name: short identity for logs and for the data fingerprint.
        vocab_size: ids run from 0 to vocab_size - 1; the model's vocabulary must be at least this large.
        specials: id -> name of every id that stands for no text.
        eos_id: closes every document in pretraining rows; None: nothing closes it.
        bos_id, pad_id: None where the tokenizer has none.
        stop_ids: ids that end generation.
    """

    name: str
    vocab_size: int
    specials: Mapping[int, str]
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
        """Text of the ids. Special and unknown ids give nothing; bytes that are no UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255 and eight special ids: 264 ids.

    End of document and padding are those of pretraining. The four control tokens of K3's chat template have their ids
    from the start, so that a pretrained run goes on with chat data without a change of its vocabulary. Two ids are in
    reserve, which makes the vocabulary a multiple of 8: eight devices can split it.
    """

    name = "byte"
    vocab_size = 264
    specials: Mapping[int, str] = dict(
        enumerate(
            ("<eos>", "<pad>", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
            + ("<|reserved_token_262|>", "<|reserved_token_263|>"),
            start=256,
        )
    )
    eos_id: int | None = 256
    bos_id: int | None = None
    pad_id: int | None = 257
    stop_ids: tuple[int, ...] = (256, 258)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")


#: Names by which a role is recognised among the special tokens of a tokenizer.json that has no tokenizer_config.json.
_USUAL_NAMES = {
    "eos_token": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]"),
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>"),
}


class JsonTokenizer:
    """A `tokenizer.json` file, run by the `tokenizers` library.

    Which special tokens are end, begin and padding is read from `tokenizer_config.json` beside it, or recognised by
    the usual names. Truncation, padding and templates stored in the file are switched off.
    """

    def __init__(self, path: Path):
        import tokenizers  # here, because byte-level runs do not need it

        try:
            self._inner = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: no tokenizer.json that can be loaded: {error}") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True  # a special token's name in a document is text
        self.name = path.name
        self.vocab_size = 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        added = self._inner.get_added_tokens_decoder()
        self.specials: Mapping[int, str] = {i: token.content for i, token in added.items() if token.special}
        roles = self._roles(path.with_name("tokenizer_config.json"))
        self.eos_id, self.bos_id, self.pad_id = (roles[role] for role in ("eos_token", "bos_token", "pad_token"))
        self.stop_ids: tuple[int, ...] = () if self.eos_id is None else (self.eos_id,)

    def _roles(self, config_path: Path) -> dict[str, int | None]:
        ids = {name: i for i, name in self.specials.items()}
        if not config_path.is_file():
            return {role: next((ids[n] for n in names if n in ids), None) for role, names in _USUAL_NAMES.items()}
        try:
            config = json.loads(config_path.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{config_path}: no valid JSON: {error}") from error
        roles: dict[str, int | None] = {}
        for role in _USUAL_NAMES:
            token = config.get(role)
            content = token.get("content") if isinstance(token, dict) else token
            roles[role] = None if content is None else self._inner.token_to_id(content)
            if content is not None and roles[role] is None:
                raise ValueError(f"{config_path}: {role} is {content!r}, which tokenizer.json does not have")
        return roles

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size]
        return self._inner.decode(known, skip_special_tokens=True)


#: Ids above the ranks (docs/k3.md section 3.9).
K3_NUM_SPECIALS = 256

#: Named special tokens of K3 by distance from the first special id (163,584 with the released ranks).
K3_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

#: How K3 splits text before merging (docs/k3.md section 3.9); the first alternative that matches wins.
K3_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        _LEAD + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        _LEAD + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

#: K3 encodes a text in parts of at most this many characters ...
_PART = 400_000
#: ... and cuts runs of space or of non-space that are longer than this.
_RUN = 25_000
_RUNS = re.compile(r"\s+|\S+")


class K3Tokenizer:
    """A tiktoken rank file (`<base64 bytes> <rank>` a line) with K3's splitting and special tokens above the ranks.

    Documents end with [EOS]; generation also stops at <|end_of_msg|>.
    """

    def __init__(self, path: Path):
        import tiktoken  # here, because byte-level runs do not need it

        ranks = _read_ranks(path)
        first = len(ranks)
        self.name = path.name
        self.vocab_size = first + K3_NUM_SPECIALS
        names = {first + k: f"<|reserved_token_{first + k}|>" for k in range(K3_NUM_SPECIALS)}
        self.specials: Mapping[int, str] = names | {first + k: name for k, name in K3_SPECIALS.items()}
        ids = {name: i for i, name in self.specials.items()}
        self.eos_id: int | None = ids["[EOS]"]
        self.bos_id: int | None = ids["[BOS]"]
        self.pad_id: int | None = ids["[PAD]"]
        self.stop_ids: tuple[int, ...] = (ids["[EOS]"], ids["<|end_of_msg|>"])
        self._num_ranks = first
        # No special tokens for tiktoken: then no text can produce one.
        self._inner = tiktoken.Encoding(self.name, pat_str=K3_SPLIT, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> np.ndarray:
        ids = [self._inner.encode_to_numpy(part, disallowed_special=()) for part in k3_parts(text)]
        return np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with ThreadPoolExecutor() as pool:  # tiktoken leaves the interpreter lock while it works
            return list(pool.map(self.encode, texts))

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode([i for i in map(int, ids) if 0 <= i < self._num_ranks])


def k3_parts(text: str) -> Iterator[str]:
    """The pieces in which K3's tokenizer encodes a text: no merge crosses their edges (docs/k3.md section 3.9)."""
    for begin in range(0, len(text), _PART):
        part = text[begin : begin + _PART]
        start = 0
        if len(part) > _RUN:
            for run in _RUNS.finditer(part):
                for cut in range(run.start() + _RUN, run.end(), _RUN):
                    yield part[start:cut]
                    start = cut
        yield part[start:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank. Not tiktoken's own reader: it keeps the first content it saw of a path in a cache."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"{path}:{number}: no tiktoken rank file: expected '<base64> <rank>'. "
                "Other tokenizers (SentencePiece) are read as tokenizer.json"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: ranks must be 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} of the 256 single bytes have no rank, the first is 0x{missing[0]:02x}"
        )
    return ranks


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer named by `data.tokenizer`: `byte`, the path of a tokenizer.json, or of a tiktoken rank file.

    Raises:
        ValueError: no such file, or a file that is neither; the message says why.
    """
    if spec == "byte":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    accepted = "'byte', a tokenizer.json file or a tiktoken rank file"
    if not path.is_file():
        raise ValueError(
            f"data.tokenizer={spec!r}: {'not a file' if path.exists() else 'no such file'}; use {accepted}"
        )
    try:
        return JsonTokenizer(path) if path.suffix == ".json" else K3Tokenizer(path)
    except OSError as error:
        raise ValueError(f"data.tokenizer={spec!r}: cannot be read: {error.strerror}") from error
