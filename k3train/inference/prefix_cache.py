"""States of token sequences seen before, found by what a new sequence begins with (docs/k3.md section 5).

Latents of MLA layers are kept per block of tokens and shared by all sequences that begin alike. Everything of fixed
size (KDA states, tails, last hidden state) is kept as one snapshot at an end of a block or where a turn ended. A prefix
can be reused up to the longest snapshot on its way whose blocks are all there, so nothing is ever used that some layer
lacks. All arrays lie in host memory and are read-only.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from k3train.inference.state import HostArrays

#: Tokens of a block in K3's serving (report section 5.4).
BLOCK = 512
#: Bytes that a cache may hold unless told otherwise.
BUDGET = 2**30
_ROOT = bytes(32)


class Chain:
    """Hashes of a growing token sequence: one per whole block, each made of the one before and the block's tokens."""

    def __init__(self, block: int):
        self.block = block
        self.keys: list[bytes] = []
        self.rest = np.zeros(0, np.int32)  # tokens after the last whole block

    def __len__(self) -> int:
        return len(self.keys) * self.block + len(self.rest)

    def append(self, tokens: Sequence[int] | np.ndarray) -> None:
        self.rest = np.concatenate([self.rest, np.asarray(tokens, np.int32)])
        while len(self.rest) >= self.block:
            self.keys.append(_hash(self.parent, self.rest[: self.block]))
            self.rest = self.rest[self.block :]

    @property
    def parent(self) -> bytes:
        """Key of the last whole block."""
        return self.keys[-1] if self.keys else _ROOT

    @property
    def key(self) -> bytes:
        """Key of the whole sequence."""
        return _hash(self.parent, self.rest) if len(self.rest) else self.parent


class Hit(NamedTuple):
    """A prefix that need not be computed: arguments of `Engine.resume`."""

    length: int  # tokens
    fixed: HostArrays
    latents: list[HostArrays]  # of its blocks in order, the last one maybe partial


@dataclass
class _Block:
    """A whole block of tokens after a certain prefix."""

    parent: bytes
    latents: HostArrays
    total: int  # bytes of the latents from the start of the sequence to here
    users: int = 0  # blocks and snapshots that come right after it
    partial: Counter[int] = field(default_factory=Counter)  # lengths of the turn ends within the next block


class _Snapshot(NamedTuple):
    length: int
    parent: bytes  # the last whole block
    latents: HostArrays  # of the partial block after it; () where there is none
    fixed: HostArrays


class PrefixCache:
    """Snapshots under a byte budget, least recently used out first.

    An entry is a snapshot with the blocks below it. Entries share blocks; a block goes with the last entry that needs
    it, and an entry goes whole. Tokens are told apart by a 256-bit hash of everything up to them.

    Args:
        budget: bytes of arrays that may be held; the hashes are not counted.
        block: tokens of a block.

    Attributes:
        held: bytes of arrays held.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, budget: int = BUDGET, block: int = BLOCK):
        if budget < 1:
            raise ValueError(f"a prefix cache of {budget} bytes holds nothing; must be at least 1")
        if block < 1:
            raise ValueError(f"blocks of {block} tokens; must be at least 1")
        self.budget = budget
        self.block = block
        self.held = 0
        self._owner: Any = None
        self._blocks = {_ROOT: _Block(_ROOT, (), 0)}
        self._snapshots: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self._refused: int | None = None  # a sequence of this length did not fit the budget

    def __len__(self) -> int:
        """Snapshots held."""
        return len(self._snapshots)

    def belongs_to(self, owner: Any) -> None:
        """Ties the cache to the weights that made its states; the first owner is the only one.

        Raises:
            ValueError: it holds states of other weights.
        """
        if self._owner is None:
            self._owner = owner
        if self._owner is not owner:
            raise ValueError("this prefix cache holds states of other weights; make a new one")

    def chain(self) -> Chain:
        """An empty sequence, to be grown together with the state that `put` is to keep."""
        return Chain(self.block)

    def find(self, tokens: Sequence[int] | np.ndarray) -> Hit | None:
        """The longest beginning of `tokens` that can be resumed, or None; it counts as used."""
        tokens = np.asarray(tokens, np.int32)
        key, best, first = _ROOT, None, 0
        while True:
            rest = tokens[first : first + self.block]
            endings = sorted((n for n in self._blocks[key].partial if n <= len(rest)), reverse=True)
            best = next((end for n in endings if (end := _hash(key, rest[:n])) in self._snapshots), best)
            first += self.block
            key = _hash(key, rest)
            if len(rest) < self.block or key not in self._blocks:
                break
            best = key if key in self._snapshots else best
        if best is None:
            return None
        self._snapshots.move_to_end(best)
        found = self._snapshots[best]
        latents = [found.latents] if found.latents else []
        key = found.parent
        while key != _ROOT:
            latents.append(self._blocks[key].latents)
            key = self._blocks[key].parent
        return Hit(found.length, found.fixed, latents[::-1])

    def put(self, chain: Chain, fixed: Callable[[], HostArrays], latents: Callable[[int, int], HostArrays]) -> bool:
        """Keeps the state at the end of a sequence; the least recently used entries make room.

        Args:
            chain: the sequence, not empty.
            fixed: gives the arrays of fixed size; called if they are not held.
            latents: gives the arrays of (first place, count); called for the blocks that are not held.

        Returns:
            Whether it is held now. What does not fit the whole budget pushes nothing out.
        """
        assert len(chain) and chain.block == self.block
        key, parent = chain.key, chain.parent
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return True
        if self._refused is not None and len(chain) >= self._refused:
            return False
        known = len(chain.keys)
        while known and chain.keys[known - 1] not in self._blocks:
            known -= 1
        whole = [latents(index * self.block, self.block) for index in range(known, len(chain.keys))]
        partial = latents(len(chain) - len(chain.rest), len(chain.rest)) if len(chain.rest) else ()
        snapshot = _Snapshot(len(chain), parent, partial, fixed())
        below = self._blocks[chain.keys[known - 1] if known else _ROOT].total
        if below + sum(map(_bytes, (*whole, partial, snapshot.fixed))) > self.budget:
            self._refused = len(chain)
            return False
        for index, arrays in enumerate(whole, known):
            self._add_block(chain.keys[index], chain.keys[index - 1] if index else _ROOT, arrays)
        self._snapshots[key] = snapshot
        self._blocks[parent].users += 1
        if len(chain.rest):
            self._blocks[parent].partial[len(chain.rest)] += 1
        self.held += _bytes(partial) + _bytes(snapshot.fixed)
        while self.held > self.budget:
            self._remove(*self._snapshots.popitem(last=False))
        return True

    def _add_block(self, key: bytes, parent: bytes, latents: HostArrays) -> None:
        size = _bytes(latents)
        self._blocks[key] = _Block(parent, latents, self._blocks[parent].total + size)
        self._blocks[parent].users += 1
        self.held += size

    def _remove(self, key: bytes, snapshot: _Snapshot) -> None:
        """Lets go of an entry and of the blocks that nobody else needs."""
        self.held -= _bytes(snapshot.latents) + _bytes(snapshot.fixed)
        above = self._blocks[snapshot.parent]
        if key != snapshot.parent:
            length = snapshot.length % self.block
            above.partial[length] -= 1
            if not above.partial[length]:
                del above.partial[length]
        above.users -= 1
        key = snapshot.parent
        while key != _ROOT and not self._blocks[key].users:
            gone = self._blocks.pop(key)
            self.held -= _bytes(gone.latents)
            self._blocks[gone.parent].users -= 1
            key = gone.parent


def _hash(parent: bytes, tokens_S: np.ndarray) -> bytes:
    return hashlib.blake2b(parent + tokens_S.tobytes(), digest_size=32).digest()


def _bytes(arrays: HostArrays) -> int:
    return sum(x.nbytes for x in arrays)
