"""Requests one after the other, each resumed from the longest prefix that the cache holds, and what that took."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from k3train.data.chat_reply import Reply
from k3train.inference.engine import Engine, Tokens, Weights
from k3train.inference.prefix_cache import PrefixCache
from k3train.inference.sample import Sampling


@dataclass(frozen=True)
class Answer:
    """A continuation and its costs. Times include the compilation of programs not met before.

    Attributes:
        tokens: new token ids, without the stop token.
        prompt_tokens, reused_tokens: tokens of the prompt; how many of them were not computed again.
        prefill_seconds: from the look-up to the prompt's last state, copies to the cache included.
        decode_seconds: of the new tokens.
        held_bytes: what the cache holds afterwards.
        compiled: programs compiled on the way.
        text: `tokens` as text, where a tokenizer was at hand.
        reply: `tokens` as an assistant's turn, where that was asked for.
    """

    tokens: list[int]
    prompt_tokens: int
    reused_tokens: int
    prefill_seconds: float
    decode_seconds: float
    held_bytes: int
    compiled: int
    text: str = ""
    reply: Reply | None = None

    @property
    def hit_rate(self) -> float:
        """Share of the prompt that was reused."""
        return self.reused_tokens / self.prompt_tokens


def answer(
    engine: Engine, weights: Weights, cache: PrefixCache | None, prompt: Tokens, max_tokens: int, sampling: Sampling,
    stops: Sequence[int] = (), *, number: int = 0,
) -> Answer:  # fmt: skip
    """Continues one prompt. The cache gets a snapshot at every end of a block of the prompt, at the prompt's end and at
    the end of the continuation.

    Prompts are cut at the ends of blocks. From such an end on, the programs and their inputs are those of a cold start,
    so that reuse changes nothing to the last bit. A turn's end inside a block lies where a decode step left it, so
    there the pieces differ, and logits agree as prefill and decode do.

    Args:
        cache: None: everything is computed.
        prompt: token ids, not empty.
        max_tokens, sampling, stops: as in `Engine.decode`.
        number: of the request; it draws as this row of a batch.

    Raises:
        NonFiniteLogits: the next token cannot be drawn.
        ValueError: the cache holds states of other weights.
    """
    programs, start = engine.num_programs, time.perf_counter()
    capacity = len(prompt) + max_tokens
    hit, chain = None, None
    if cache is not None:
        cache.belongs_to(weights)
        hit, chain = cache.find(prompt), cache.chain()
    if hit is None:
        reused, sequences = 0, engine.start(1, capacity)
    else:
        reused, sequences = hit.length, engine.resume(*hit, capacity)
    if chain is not None:
        chain.append(prompt[:reused])

    def keep(tokens: Tokens) -> None:
        if cache is None or chain is None:
            return
        chain.append(tokens)
        now = sequences
        cache.put(chain, lambda: engine.fixed_state(now), lambda first, count: engine.latents(now, first, count))

    block = len(prompt) if cache is None else cache.block
    first = reused
    while first < len(prompt):
        last = min((first // block + 1) * block, len(prompt))
        sequences = engine.extend(weights, sequences, [prompt[first:last]])
        keep(prompt[first:last])
        first = last
    jax.block_until_ready(sequences.state.hidden)
    prefilled = time.perf_counter()
    (tokens,), sequences = engine.decode(weights, sequences, max_tokens, sampling, stops, first_row=number)
    decoded = time.perf_counter()
    if tokens:
        keep(tokens)
    return Answer(
        tokens=tokens,
        prompt_tokens=len(prompt),
        reused_tokens=reused,
        prefill_seconds=prefilled - start,
        decode_seconds=decoded - prefilled,
        held_bytes=0 if cache is None else cache.held,
        compiled=engine.num_programs - programs,
    )


def read_prompts(file: Path) -> list[str]:
    """Prompts of a file: in `.jsonl` one JSON text or object {"prompt": text} a line, otherwise every line as it is.

    Empty lines are skipped.

    Raises:
        ValueError: a line that is not one of these, or no prompt at all.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_json_prompt(line, f"{file}:{number}") if file.suffix == ".jsonl" else line)
    if not prompts:
        raise ValueError(f"{file} holds no prompts")
    return prompts


def _json_prompt(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f'{place}: must be a text or an object {{"prompt": text}}')
    return text


def report(answers: Sequence[Answer]) -> str:
    """One row a request, and their sum."""
    rows = [_HEAD, *(_row(str(number), one) for number, one in enumerate(answers))]
    if len(answers) > 1:
        total = Answer(
            tokens=[token for one in answers for token in one.tokens],
            prompt_tokens=sum(one.prompt_tokens for one in answers),
            reused_tokens=sum(one.reused_tokens for one in answers),
            prefill_seconds=sum(one.prefill_seconds for one in answers),
            decode_seconds=sum(one.decode_seconds for one in answers),
            held_bytes=answers[-1].held_bytes,
            compiled=sum(one.compiled for one in answers),
        )
        rows.append(_row("all", total))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


_HEAD = ("request", "prompt", "reused", "hit rate", "prefill s", "new", "decode s", "programs", "bytes held")


def _row(name: str, one: Answer) -> tuple[str, ...]:
    return (
        name,
        f"{one.prompt_tokens:,}",
        f"{one.reused_tokens:,}",
        f"{one.hit_rate:.1%}",
        f"{one.prefill_seconds:.3f}",
        f"{len(one.tokens):,}",
        f"{one.decode_seconds:.3f}",
        str(one.compiled),
        f"{one.held_bytes:,}",
    )
