"""The cache alone, with made-up arrays: what a hit is, what an eviction takes with it."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.inference.prefix_cache import Chain, PrefixCache

FIXED, TOKEN = 1000, 10  # bytes of a snapshot, of the latents of a token


def fixed_of(tokens):
    """Arrays that tell of what they are."""
    values = np.zeros(FIXED // 4, np.float32)
    values[0], values[1] = len(tokens), hash(tuple(tokens)) % 1000
    return (values,)


def keep(cache, tokens, *, upto=None):
    """Puts a snapshot at every end of a block and at the end, as a prefill does."""
    chain, held, asked = cache.chain(), [], []

    def latents(first, count):
        asked.append((first, count))
        return (np.repeat(np.asarray(tokens[first : first + count], np.int8)[None], TOKEN, axis=0),)

    for first in range(0, len(tokens), cache.block):
        chain.append(tokens[first : first + cache.block])
        if upto is None or len(chain) in upto:
            held.append(cache.put(chain, lambda: fixed_of(tokens[: len(chain)]), latents))
    return held, asked


def found(cache, tokens):
    """Length of the hit, after a look at everything it brings."""
    hit = cache.find(tokens)
    if hit is None:
        return 0
    np.testing.assert_array_equal(hit.fixed, fixed_of(tokens[: hit.length]))
    latents = np.concatenate([piece[0] for piece in hit.latents], axis=1)
    np.testing.assert_array_equal(latents, np.tile(tokens[: hit.length], (TOKEN, 1)))
    return hit.length


def check(cache):
    """Nothing is half there, and the count of bytes is right."""
    blocks, snapshots = dict(cache._blocks), cache._snapshots
    root = next(key for key, block in blocks.items() if block.parent == key)
    users = dict.fromkeys(blocks, 0)
    for key, block in blocks.items():
        if key != root:
            assert block.total == blocks[block.parent].total + sum(x.nbytes for x in block.latents)
            users[block.parent] += 1
    for key, snapshot in snapshots.items():
        users[snapshot.parent] += 1
        length, above = snapshot.length % cache.block, snapshot.parent
        assert (key == above) == (length == 0)
        for _ in range(snapshot.length // cache.block):
            above = blocks[above].parent
        assert above == root
    assert {key: block.users for key, block in blocks.items()} == users
    assert all(number for key, number in users.items() if key != root), "a block that no snapshot needs"
    partial = sum((block.partial for block in blocks.values()), start=type(blocks[root].partial)())
    assert sum(partial.values()) == sum(s.length % cache.block > 0 for s in snapshots.values())
    arrays = [x for b in blocks.values() for x in b.latents]
    arrays += [x for s in snapshots.values() for x in (*s.latents, *s.fixed)]
    assert cache.held == sum(x.nbytes for x in arrays) <= cache.budget


def test_the_example_of_the_report():
    """docs/k3.md section 5: 2,800 matching tokens, blocks of 512: the hit is at 2,560."""
    cache = PrefixCache()
    assert cache.block == 512
    stored = np.arange(4000) % 100
    keep(cache, stored)
    asked = np.concatenate([stored[:2800], 101 + stored[:700] % 10])
    assert found(cache, asked) == 2560
    assert found(cache, asked[:2560]) == 2560 and found(cache, asked[:2559]) == 2048 and found(cache, asked[:511]) == 0


def test_blocks_without_a_snapshot_are_not_enough():
    """Latents match further than states do: every layer must have what it needs."""
    cache = PrefixCache(block=8)
    tokens = list(range(50))
    keep(cache, tokens, upto=(16, 40))
    assert found(cache, tokens) == 40
    assert found(cache, [*tokens[:36], 99, 98]) == 16
    assert found(cache, [*tokens[:15], 99]) == 0
    check(cache)


def test_a_turn_s_end_inside_a_block_is_found_exactly():
    cache = PrefixCache(block=8)
    for turn in ([1, 2, 3], list(range(21)), [*range(21), 50, 51], [*range(20), 60, 61]):
        keep(cache, turn, upto=(len(turn),) if len(turn) < 8 else None)
        check(cache)
    assert found(cache, [1, 2, 3, 4]) == 3
    assert found(cache, [1, 2]) == 0
    assert found(cache, [*range(21), 7]) == 21
    assert found(cache, [*range(21), 50, 51, 52]) == 23
    assert found(cache, [*range(20), 60, 61, 62]) == 22
    assert found(cache, [*range(20), 60, 62]) == 16
    assert found(cache, [2, 2, 3]) == 0


def test_a_hash_stands_for_everything_before_it():
    """The same block after another beginning is another block; pieces of appending do not matter."""
    cache = PrefixCache(block=4)
    keep(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert found(cache, [9, 2, 3, 4, 5, 6, 7, 8]) == 0
    whole, pieces = Chain(4), Chain(4)
    whole.append(np.arange(11))
    for token in range(11):
        pieces.append([token])
    assert (whole.keys, whole.key, len(whole)) == (pieces.keys, pieces.key, 11)
    assert len({*whole.keys, whole.key}) == 3


def test_only_what_is_missing_is_asked_for():
    cache = PrefixCache(block=4)
    assert keep(cache, list(range(10)))[1] == [(0, 4), (4, 4), (8, 2)]
    assert keep(cache, list(range(10)))[1] == []
    assert keep(cache, [*range(8), 50, 51, 52, 53, 54])[1] == [(8, 4), (12, 1)]


def test_the_least_recently_used_goes_first():
    one, two, three = (list(range(start, start + 12)) for start in (0, 20, 40))
    cache = PrefixCache(budget=2 * (FIXED + 12 * TOKEN) + 100, block=4)
    for tokens in (one, two):
        keep(cache, tokens, upto=(12,))
    assert found(cache, [*one, 5]) == 12
    keep(cache, three, upto=(12,))
    check(cache)
    assert [found(cache, tokens) for tokens in (one, two, three)] == [12, 0, 12]
    assert len(cache) == 2 and len(cache._blocks) == 1 + 2 * 3


def test_shared_blocks_stay_while_anyone_needs_them():
    start, suffixes = list(range(8)), ([50] * 4, [60] * 4, [70] * 4)
    cache = PrefixCache(budget=2 * FIXED + 16 * TOKEN, block=4)
    for suffix in suffixes:
        keep(cache, start + suffix, upto=(12,))
        check(cache)
    assert [found(cache, start + suffix) for suffix in suffixes] == [0, 12, 12]
    assert cache.held == cache.budget


def test_what_exceeds_the_budget_pushes_nothing_out():
    cache = PrefixCache(budget=FIXED + 8 * TOKEN, block=4)
    assert keep(cache, list(range(4)))[0] == [True]
    held, asked = keep(cache, list(range(30, 60)))
    assert held == [True, True] + 6 * [False]
    assert asked == [(0, 4), (4, 4), (8, 4)], "longer ones are not even taken off the device"
    assert found(cache, list(range(30, 60))) == 8
    check(cache)


def test_without_latents_or_without_states():
    """A stack of KDA layers alone and one of MLA layers alone."""
    tokens = list(range(22))
    cache = PrefixCache(budget=10 * FIXED, block=8)
    for end in (8, 16, 22):
        chain = cache.chain()
        chain.append(tokens[:end])
        cache.put(chain, partial(fixed_of, tokens[:end]), lambda first, count: ())
    assert cache.held == 3 * FIXED
    hit = cache.find(tokens)
    assert hit is not None and hit.length == 22 and all(piece == () for piece in hit.latents)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from([3, 4]), min_size=1, max_size=14), st.booleans()), min_size=1, max_size=25
    ),
    st.integers(1, 6 * FIXED),
)
def test_after_any_sequence_of_uses_nothing_is_half_there(uses, budget):
    cache = PrefixCache(budget=budget, block=4)
    for tokens, write in uses:
        best = found(cache, tokens)
        if write:
            held, _ = keep(cache, tokens)
            assert not held[-1] or found(cache, tokens) == len(tokens)
        else:
            assert found(cache, tokens) == best
        check(cache)


@pytest.mark.parametrize(("arguments", "words"), [({"budget": 0}, "0 bytes"), ({"block": 0}, "blocks of 0 tokens")])
def test_sizes_below_one_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        PrefixCache(**arguments)


def test_states_of_other_weights_are_refused():
    cache, one, two = PrefixCache(), object(), object()
    cache.belongs_to(one)
    cache.belongs_to(one)
    with pytest.raises(ValueError, match="other weights"):
        cache.belongs_to(two)
