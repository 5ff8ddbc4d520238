"""A run opened for use: its logits and its text, from the weights of a checkpoint or from those under training."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from k3train.checkpoint.orbax import Checkpoints
from k3train.config.load import from_json
from k3train.config.schema import Config, ModelConfig, QuantConfig
from k3train.config.values import KNOBS
from k3train.core.tree import Tree
from k3train.data.chat_corpus import encode_prompt
from k3train.data.chat_reply import read_reply
from k3train.data.chat_template import END, control_ids
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.inference.answer import Answer, answer
from k3train.inference.engine import Engine, Weights
from k3train.inference.prefix_cache import PrefixCache
from k3train.inference.sample import Sampling
from k3train.model.k3 import blueprint
from k3train.model.quantise import straddling
from k3train.parallel.mesh import make_mesh
from k3train.parallel.rules import indivisible

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"


class Run:
    """A configuration and its weights at one step: from `load`, or made of the arrays of a training under way.

    Compiled programs are shared by all runs of one model on one mesh, so a run that is made anew after some more
    training compiles nothing.

    Attributes:
        config: the frozen configuration.
        step: optimizer steps behind the weights.
        weights: parameters and router bias, sharded as in training over the mesh they live on. Nothing changes them.
            Where training quantises routed experts (`config.quant`), they are the rounded ones.
    """

    def __init__(self, config: Config, params: Tree, bias: Tree, *, step: int):
        self.config = config
        self.step = step
        self._engine = _engine(config.model, config.quant, jax.tree.leaves(params)[0].sharding.mesh)
        self.weights = Weights(self._engine.rounded(params), bias)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of `config.data.tokenizer`.

        Raises:
            ValueError: its file is not there or cannot be read.
        """
        return load_tokenizer(self.config.data.tokenizer)

    def logits(self, tokens: ArrayLike, segment_ids: ArrayLike | None = None) -> np.ndarray:
        """Logits of every position, computed as in training.

        Args:
            tokens: int [B, S] token ids.
            segment_ids: int [B, S], the number of the document a token belongs to, from 1; 0 is padding, whose logits
                mean nothing. Documents of a row do not see each other. None: every row is one document.

        Returns:
            float32 [B, S, vocabulary]; entry [b, s] is about the token after s.

        Raises:
            ValueError: shapes or ids that do not fit.
        """
        tokens_BS = _integers("tokens", tokens)
        if tokens_BS.ndim != 2 or not tokens_BS.size:
            raise ValueError(f"tokens has the shape {list(tokens_BS.shape)}; must be [rows, positions], none of them 0")
        self._check_ids("tokens", tokens_BS)
        segments_BS = np.ones_like(tokens_BS) if segment_ids is None else _integers("segment_ids", segment_ids)
        if segments_BS.shape != tokens_BS.shape:
            raise ValueError(f"segment_ids has the shape {list(segments_BS.shape)}, tokens {list(tokens_BS.shape)}")
        if segments_BS.min() < 0:
            raise ValueError(f"segment_ids holds {segments_BS.min()}; must be 1 and up, 0 for padding")
        return self._engine.logits(self.weights, tokens_BS.astype(np.int32), segments_BS.astype(np.int32))

    @overload
    def generate(
        self, prompts: Sequence[str], *, max_tokens: int = ..., temperature: float = ..., top_p: float = ...,
        seed: int = ..., stop: Sequence[int] | None = ...,
    ) -> list[str]: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = ..., temperature: float = ..., top_p: float = ...,
        seed: int = ..., stop: Sequence[int] | None = ...,
    ) -> list[list[int]]: ...  # fmt: skip

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        max_tokens: int = 200,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
    ) -> list[Any]:
        """Continuations of `prompts`, without the prompt and without the stop token.

        Args:
            prompts: texts, or lists of token ids; of any lengths, none empty.
            max_tokens: tokens to add at most.
            temperature: divisor of the logits; 0 takes the likeliest token.
            top_p: draw from the likeliest tokens that together hold this share of the probability; 1: from all.
            seed: of the draws. Row r draws from (seed, r): the same prompts and seed give the same text, and the other
                rows do not matter.
            stop: ids that end a continuation; None: the tokenizer's.

        Returns:
            Texts for texts, lists of ids for lists of ids.

        Raises:
            ValueError: an argument out of range, an empty prompt, an id that the model does not have, or logits that
                are not finite (names row and position).
        """
        sampling = Sampling(temperature, top_p, seed)
        ids, as_text = self._prompts(prompts, max_tokens)
        if not ids:
            return []
        stop = self.tokenizer.stop_ids if stop is None else stop
        out = self._engine.generate(self.weights, ids, max_tokens, sampling, stop)
        return [self.tokenizer.decode(row) for row in out] if as_text else out

    def answers(
        self,
        prompts: Sequence[Any],
        cache: PrefixCache | None = None,
        *,
        max_tokens: int = 200,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
    ) -> Iterator[Answer]:
        """`generate`, one prompt after the other, each reusing the beginning that it shares with earlier ones.

        >>> import k3train
        >>> run = k3train.load("runs/tiny")
        >>> cache = k3train.PrefixCache(budget=2**20, block=16)  # kept between calls, as long as the run
        >>> prompts = ["def a_function_with_a_long_name(one, two): pass # " + x for x in ("first", "second")]
        >>> [answer.reused_tokens for answer in run.answers(prompts, cache, max_tokens=4)]
        [0, 48]

        Args:
            prompts, max_tokens, temperature, top_p, seed, stop: as for `generate`; the text is the same.
            cache: states kept from earlier prompts, of this run only; gets those of the new ones. None: no reuse.

        Returns:
            For every prompt, as soon as it is done, its continuation with what was reused and how long it took.

        Raises:
            ValueError: as `generate`; a cache that holds states of other weights.
        """
        sampling = Sampling(temperature, top_p, seed)
        ids, as_text = self._prompts(prompts, max_tokens)
        stop = self.tokenizer.stop_ids if stop is None else stop
        if cache is not None:
            cache.belongs_to(self.weights)

        def one(number: int, prompt: np.ndarray) -> Answer:
            found = answer(self._engine, self.weights, cache, prompt, max_tokens, sampling, stop, number=number)
            return replace(found, text=self.tokenizer.decode(found.tokens)) if as_text else found

        return (one(number, prompt) for number, prompt in enumerate(ids))

    def replies(
        self,
        conversations: Sequence[Mapping[str, Any]],
        cache: PrefixCache | None = None,
        *,
        mode: str | None = None,
        effort: str | None = None,
        max_tokens: int = 200,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[Answer]:
        """The assistant's next turn in each conversation, in K3's chat template; ends at `<|end_of_msg|>`.

        >>> import k3train
        >>> run = k3train.load("runs/tiny")
        >>> messages = [{"role": "user", "content": "What does `json.dumps` do?"}]
        >>> (answer,) = run.replies([{"messages": messages}], mode="instruct", max_tokens=8)
        >>> messages.append(answer.reply.message)  # in the same form, so that the conversation can go on
        >>> messages[-1]["role"]
        'assistant'

        Args:
            conversations: each as a line of a chat file: an object with `messages`, and `tools` where there are any.
            mode: `thinking` or `instruct`; None: that of the run's data. A conversation's own `thinking` goes first.
            effort: `none`, `low`, `high` or `max`; None: likewise.
            cache, max_tokens, temperature, top_p, seed: as for `answers`.

        Returns:
            For every conversation, as soon as it is done, its answer with `reply`; `text` is that of the reply.

        Raises:
            ValueError: as `answers`; a conversation that cannot be rendered; another mode or effort; a tokenizer
                without the control tokens.
        """
        data = self.config.data
        for name, value in (("chat_mode", mode), ("chat_effort", effort)):
            if value is not None:
                choices = KNOBS[f"data.{name}"].choices
                if value not in choices:
                    raise ValueError(f"{name.removeprefix('chat_')}={value!r}: must be one of {', '.join(choices)}")
                data = replace(data, **{name: value})
        tokenizer = self.tokenizer
        prompts = [encode_prompt(dict(conversation), data, tokenizer).tolist() for conversation in conversations]
        stop = {control_ids(tokenizer)[END], *tokenizer.stop_ids}
        answers = self.answers(
            prompts, cache, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=sorted(stop)
        )

        def one(prompt: list[int], found: Answer) -> Answer:
            reply = read_reply(prompt, found.tokens, tokenizer)
            return replace(found, text=reply.text, reply=reply)

        return (one(prompt, found) for prompt, found in zip(prompts, answers, strict=True))

    def _prompts(self, prompts: Sequence[Any], max_tokens: int) -> tuple[list[np.ndarray], bool]:
        """Token ids of every prompt, and whether they came as texts."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: must be at least 1")
        if isinstance(prompts, str):
            raise ValueError("prompts is one string; must be a list of them")
        prompts = list(prompts)
        as_text = [isinstance(prompt, str) for prompt in prompts]
        if len(set(as_text)) > 1:
            raise ValueError("prompts mixes texts and lists of token ids; must be all of one kind")
        return [self._prompt(row, prompt) for row, prompt in enumerate(prompts)], any(as_text)

    def _prompt(self, row: int, prompt: Any) -> np.ndarray:
        if isinstance(prompt, str):
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8, for example
                raise ValueError(f"prompt {row} holds half a surrogate pair at character {error.start}") from error
        ids_S = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _integers(f"prompt {row}", prompt)
        if ids_S.ndim != 1 or not ids_S.size:
            raise ValueError(f"prompt {row} holds no tokens; must be a text or a flat list of ids, not empty")
        self._check_ids(f"prompt {row}", ids_S)
        return ids_S

    def _check_ids(self, what: str, ids: np.ndarray) -> None:
        vocabulary = self.config.model.vocab_size
        wrong = ids[(ids < 0) | (ids >= vocabulary)]
        if wrong.size:
            raise ValueError(f"{what} holds the id {wrong[0]}; the model has 0 to {vocabulary - 1}")


def load(workdir: str | os.PathLike[str], step: int | None = None, *, mesh: Mesh | None = None) -> Run:
    """Opens a trained or imported run. Its optimizer is not read.

    >>> import k3train
    >>> run = k3train.load("runs/tiny")
    >>> run.logits([[100, 101, 102]]).shape == (1, 3, run.config.model.vocab_size)
    True
    >>> texts = run.generate(["def main(", "import ", "class "], max_tokens=16, temperature=0.8, top_p=0.95, seed=1)
    >>> len(texts)
    3

    Args:
        workdir: run folder.
        step: which checkpoint; None: the newest.
        mesh: where the weights go, from `parallel.mesh.make_mesh`; None: the first device.

    Raises:
        ValueError: no such run, checkpoint or mesh; or a checkpoint that does not fit the configuration beside it.
    """
    folder = Path(workdir)
    config = from_json(_config_text(folder), str(folder / CONFIG_FILE))
    if mesh is None:
        mesh = make_mesh({}, jax.local_devices()[:1])
    infos, sizes = blueprint(config.model).infos, dict(mesh.shape)
    problems = indivisible(infos, sizes) + straddling(infos, config.quant, sizes)
    if problems:
        raise ValueError("this mesh cannot hold the model:\n" + "\n".join(problems))
    params, bias = _engine(config.model, config.quant, mesh).abstract_weights()
    with Checkpoints(folder / CHECKPOINTS) as checkpoints:
        step = checkpoints.resolve(step)
        model = checkpoints.restore(step, {"model": {"params": params, "bias": bias}})["model"]
    return Run(config, model["params"], model["bias"], step=step)


@lru_cache(maxsize=4)
def _engine(config: ModelConfig, quant: QuantConfig, mesh: Mesh) -> Engine:
    return Engine(config, mesh, quant=quant)


def _config_text(folder: Path) -> str:
    file = folder / CONFIG_FILE
    if file.is_file():
        return file.read_text()
    near = next((p for p in (folder, *folder.parents) if p.is_dir()), Path())
    runs = sorted(p.parent.name for p in near.glob(f"*/{CONFIG_FILE}"))
    reason = f"it holds no {CONFIG_FILE}" if folder.is_dir() else "there is no such folder"
    raise ValueError(f"{folder} is not a run: {reason}; runs in {near}: {', '.join(runs) or 'none'}")


def _integers(what: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{what}: rows of different lengths; pad them and say so in segment_ids") from error
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{what} holds {array.dtype}; must be integers")
    return array.astype(np.int64)
