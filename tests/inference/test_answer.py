"""Answers from a prefix cache are the cold ones; what they report; prompts from a file."""

import jax
import numpy as np
import pytest

from k3train.config.schema import ModelConfig
from k3train.inference.answer import Answer, answer, read_prompts, report
from k3train.inference.engine import CHUNK, Engine, NonFiniteLogits
from k3train.inference.prefix_cache import PrefixCache
from k3train.inference.sample import Sampling
from k3train.parallel.mesh import make_mesh
from tests.inference.conftest import Micro, random_weights
from tests.tolerances import assert_close

GREEDY = Sampling(0.0)
DRAWN = Sampling(1.0, 0.95, seed=5)
#: The tests' blocks; the engine works in pieces of at most 32 tokens.
BLOCK = 16
NEW = 10


SWITCHES = {
    "both, dense": {"num_layers": 3, "kda_layers": (0, 1), "mla_layers": (2,), "dense_layers": (0, 1, 2)},
    "KDA alone": {"kda_layers": (0, 1), "mla_layers": ()},
    "MLA alone": {"kda_layers": (), "mla_layers": (0, 1)},
    "Kimi-Linear's switches, bfloat16": {
        "kda_layers": (0,), "mla_layers": (1,), "dense_layers": (0,), "moe_layers": (1,), "kda_gate": "softplus",
        "activation": "swiglu", "kda_output_gate": "low_rank", "mla_q_lora_rank": 0, "mla_output_gate": False,
        "moe_latent_size": 0, "compute_dtype": "bfloat16",
    },
}  # fmt: skip


def make(chunk=32, **switches) -> Micro:
    """A model that compiles faster than the one with every mechanism."""
    values = {
        "vocab_size": 256, "hidden_size": 32, "num_layers": 2, "dense_layers": (0, 1), "moe_layers": (),
        "attn_res": "none", "intermediate_size": 32, "kda_num_heads": 2, "kda_head_dim": 16, "kda_gate_rank": 8,
        "mla_num_heads": 2, "mla_kv_lora_rank": 16, "num_experts": 4, "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
    }  # fmt: skip
    config = ModelConfig(**(values | switches))
    engine = Engine(config, make_mesh({}, jax.devices()[:1]), chunk=chunk)
    return Micro(config, random_weights(engine), engine)


@pytest.fixture(scope="module")
def small() -> Micro:
    return make(**SWITCHES["both, dense"])


@pytest.fixture(scope="module")
def prompts():
    """Three that share 40 tokens, which are two and a half blocks."""
    rng = np.random.default_rng(2)
    shared = rng.integers(0, 256, 40)
    return [np.concatenate([shared, rng.integers(0, 256, length)]).astype(np.int32) for length in (14, 9, 1)]


def ask(micro, cache, prompt, sampling=GREEDY, **options):
    return answer(micro.engine, micro.weights, cache, prompt, NEW, sampling, **options)


def recorded(cache):
    """Bytes of everything that the cache holds."""
    blocks = [x.tobytes() for block in cache._blocks.values() for x in block.latents]
    return blocks, [x.tobytes() for s in cache._snapshots.values() for x in (*s.latents, *s.fixed)]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_hit_generates_what_a_cold_start_does(micro, prompts, sampling):
    """After another suffix, the same again, and as rows of one batch."""
    cache = PrefixCache(block=BLOCK)
    batch = micro.engine.generate(micro.weights, [*prompts, prompts[0]], NEW, sampling)
    reused = []
    for number, prompt in enumerate(prompts):
        warm = ask(micro, cache, prompt, sampling, number=number)
        cold = ask(micro, None, prompt, sampling, number=number)
        assert warm.tokens == cold.tokens == batch[number]
        assert (cold.reused_tokens, cold.held_bytes) == (0, 0)
        assert (warm.prompt_tokens, warm.held_bytes) == (len(prompt), cache.held)
        reused.append(warm.reused_tokens)
    assert reused == [0, 32, 32]
    before = recorded(cache)
    again = ask(micro, cache, prompts[0], sampling, number=3)
    assert again.tokens == batch[3], "the whole prompt is held: nothing is left to prefill"
    assert again.reused_tokens == len(prompts[0]) and again.hit_rate == 1
    assert set(before[0]) <= set(recorded(cache)[0]) and set(before[1]) <= set(recorded(cache)[1]), "used as copies"


def test_from_the_end_of_a_block_on_not_a_bit_differs(small, prompts):
    """The pieces after a hit are those of a cold start."""
    cache = PrefixCache(block=BLOCK)
    ask(small, cache, prompts[0])
    hit = cache.find(prompts[1])
    assert hit is not None and hit.length == 32

    def state(sequences):
        for first in range(int(sequences.lengths[0]), len(prompts[1]), BLOCK):
            sequences = small.engine.extend(small.weights, sequences, [prompts[1][first : first + BLOCK]])
        return small.engine.fixed_state(sequences), small.engine.latents(sequences, 0, len(prompts[1]))

    warm, cold = state(small.engine.resume(*hit, 64)), state(small.engine.start(1, 64))
    jax.tree.map(np.testing.assert_array_equal, warm, cold)


def test_after_eviction_it_is_the_same(small, prompts):
    """A budget that holds about one prompt: entries come and go, texts stay."""
    cache = PrefixCache(block=BLOCK)
    ask(small, cache, prompts[0])
    tight = PrefixCache(budget=cache.held, block=BLOCK)
    wanted = [ask(small, None, prompt).tokens for prompt in prompts]
    other = np.random.default_rng(9).integers(0, 256, 60).astype(np.int32)
    for _ in range(2):
        reused = []
        for prompt, tokens in zip(prompts, wanted, strict=True):
            warm = ask(small, tight, prompt)
            assert warm.tokens == tokens and warm.held_bytes <= tight.budget
            reused.append(warm.reused_tokens)
        assert reused == [0, 32, 32]
        for prompt in (other, other[::-1]):
            assert ask(small, tight, prompt).reused_tokens == 0
        assert tight.find(prompts[0]) is None, "pushed out"


def test_a_conversation_goes_on_where_its_turn_ended(small, prompts):
    """The next prompt holds the last one and its answer: all of that is reused, and the text is the cold one's."""
    cache = PrefixCache(block=BLOCK)
    prompt = prompts[0]
    for more in ([7, 8, 9], list(range(30))):
        first = ask(small, cache, prompt)
        longer = np.concatenate([prompt, first.tokens, more]).astype(np.int32)
        second = ask(small, cache, longer)
        assert second.reused_tokens == len(prompt) + NEW
        assert second.tokens == ask(small, None, longer).tokens
        prompt = longer
    # a stop token is not fed: the turn ended before it
    stop = ask(small, None, prompts[1]).tokens[3]
    stopped = ask(small, cache, prompts[1], stops=[stop])
    following = np.concatenate([prompts[1], stopped.tokens, [stop, 3]]).astype(np.int32)
    assert ask(small, cache, following).reused_tokens == len(prompts[1]) + len(stopped.tokens)


def test_a_restored_state_at_every_kind_of_length_is_a_prefill_in_one_go(small, prompts):
    """Ends of blocks and lengths off any chunk (docs/k3.md section 5, last item but one)."""
    prompt = np.concatenate([prompts[0], prompts[1]])[:64]
    whole = small.engine.logits(small.weights, prompt[None], np.ones((1, 64), np.int32))[0]
    for length in (1, 15, 16, 17, 33, 48, 63):
        sequences = small.engine.extend(small.weights, small.engine.start(1, 64), [prompt[:length]])
        saved = small.engine.fixed_state(sequences), [small.engine.latents(sequences, 0, length)]
        resumed = small.engine.resume(length, *saved, capacity=64)
        resumed = small.engine.extend(small.weights, resumed, [prompt[length:]])
        assert_close(small.engine.next_logits(small.weights, resumed)[0], whole[-1], "decode", f"cut at {length}")
        assert all(not x.flags.writeable for x in (*saved[0], *saved[1][0]))


def test_blocks_of_the_released_size():
    """512 tokens, and pieces as long: lengths at the ends of blocks and off them are one full forward."""
    real, cache = make(CHUNK, **SWITCHES["both, dense"]), PrefixCache()
    rng = np.random.default_rng(3)
    row = rng.integers(0, 256, 1200).astype(np.int32)
    full = real.engine.logits(real.weights, row[None], np.ones((1, len(row)), np.int32))[0]
    for length in (1024, 1025, 1200):
        one = ask(real, cache, row[:length])
        hit = cache.find(row[:length])
        assert hit is not None and hit.length == length
        got = real.engine.next_logits(real.weights, real.engine.resume(*hit, 2048))[0]
        assert_close(got, full[length - 1], "decode", f"{length} tokens, {one.reused_tokens} of them reused")
    other = np.concatenate([row[:1024], 255 - row[1024:]])
    warm, cold = (ask(real, held, other) for held in (cache, None))
    assert (warm.reused_tokens, cold.reused_tokens) == (1024, 0)
    assert warm.tokens == cold.tokens


@pytest.mark.parametrize("name", ["KDA alone", "MLA alone", "Kimi-Linear's switches, bfloat16"])
def test_other_stacks(name, prompts):
    small, cache = make(**SWITCHES[name]), PrefixCache(block=BLOCK)
    for prompt, reused in zip(prompts, (0, 32, 32), strict=True):
        warm = ask(small, cache, prompt)
        assert warm.reused_tokens == reused
        assert warm.tokens == ask(small, None, prompt).tokens
        if small.config.compute_dtype != "float32":
            continue  # prefill and decode round differently there
        row = np.concatenate([prompt, warm.tokens])[None].astype(np.int32)
        full = small.engine.logits(small.weights, row, np.ones_like(row))[0]
        assert warm.tokens == full[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_on_a_training_mesh(micro, prompts):
    """A row comes off a mesh whole and goes back onto it, in another place of the batch."""
    engine = Engine(micro.config, make_mesh({"data": 2, "expert": 2, "tensor": 2}), chunk=32)
    weights = micro.on(engine)
    sequences = engine.extend(weights, engine.start(3, 64), [prompt[:32] for prompt in prompts])
    wanted = engine.next_logits(weights, sequences)
    fixed, latents = engine.fixed_state(sequences, row=2), engine.latents(sequences, 0, 32, row=2)
    alone = micro.engine.start(1, 64)
    for first in (0, 16):
        alone = micro.engine.extend(micro.weights, alone, [prompts[2][first : first + 16]])
    for array, like in zip((*fixed, *latents), (*micro.engine.fixed_state(alone),
                           *micro.engine.latents(alone, 0, 32)), strict=True):  # fmt: skip
        assert_close(array, like, "decode")
    resumed = engine.resume(32, fixed, [latents], 64)
    np.testing.assert_array_equal(engine.next_logits(weights, resumed)[0], wanted[2])
    together = [prompt[32:] for prompt in prompts]
    wanted = engine.next_logits(weights, engine.extend(weights, sequences, together))
    resumed = engine.next_logits(weights, engine.extend(weights, resumed, together[2:]))
    assert_close(resumed[0], wanted[2], "decode")


def test_programs_are_compiled_once_per_bucket(small, prompts):
    cache = PrefixCache(block=BLOCK)
    for prompt in prompts:
        ask(small, cache, prompt)
    assert [ask(small, cache, prompt[:-1]).compiled for prompt in prompts] == [0, 0, 0]
    assert small.engine.num_programs == len(set(small.engine.programs))
    assert {size for kind, *_, size in small.engine.programs if kind == "latents"} <= {16, 32, 64}


def test_refusals_name_the_request(small, prompts):
    table = small.weights.params["embed"]["table"].at[int(prompts[0][20])].set(np.nan)
    spoiled = small.weights._replace(params={**small.weights.params, "embed": {"table": table}})
    with pytest.raises(NonFiniteLogits, match=f"row 7 at position {len(prompts[0])} "):
        answer(small.engine, spoiled, None, prompts[0], 4, GREEDY, number=7)
    cache = PrefixCache(block=BLOCK)
    ask(small, cache, prompts[0])
    with pytest.raises(ValueError, match="other weights"):
        answer(small.engine, spoiled, cache, prompts[0], 4, GREEDY)


def test_prompts_from_a_file(tmp_path):
    text, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text('def a():\n\n  {"x": 1}\n')
    assert read_prompts(text) == ["def a():", '  {"x": 1}']
    objects.write_text('"one\\ntwo"\n{"prompt": "three\u2028four", "id": 4}\n', encoding="utf-8")
    assert read_prompts(objects) == ["one\ntwo", "three\u2028four"]
    for content, words in ((b"{\n", ":1: not JSON"), (b'"a"\n{"text": "b"}', ":2: must be"), (b"\n", "no prompts"),
                           (b'"\xff"', "not UTF-8")):  # fmt: skip
        objects.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_prompts(objects)


def test_the_report_has_a_row_a_request_and_the_sum():
    answers = [Answer([1, 2], 5000, 0, 1.5, 0.25, 2**20, 4), Answer([3], 5000, 4096, 0.25, 0.5, 2**21, 0)]
    head, *rows = report(answers).splitlines()
    assert head.split()[:4] == ["request", "prompt", "reused", "hit"]
    assert [row.split() for row in rows] == [
        ["0", "5,000", "0", "0.0%", "1.500", "2", "0.250", "4", "1,048,576"],
        ["1", "5,000", "4,096", "81.9%", "0.250", "1", "0.500", "0", "2,097,152"],
        ["all", "10,000", "4,096", "41.0%", "1.750", "3", "0.750", "4", "2,097,152"],
    ]
    assert len(report(answers[:1]).splitlines()) == 2
