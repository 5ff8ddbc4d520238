"""Opening a run: its logits, its text, and what is refused."""

import doctest
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import k3train
from k3train.checkpoint.orbax import Checkpoints
from k3train.config.load import to_json
from k3train.config.schema import Config, DataConfig
from k3train.data.chat_reply import Reply
from k3train.inference import run as run_module
from k3train.inference.answer import Answer
from k3train.inference.prefix_cache import PrefixCache
from k3train.inference.run import Run, load
from k3train.parallel.mesh import make_mesh

PROMPTS = ["def main(", "import ", "class "]


def save(folder, micro, steps=(3,), without=()):
    """A run folder as training leaves it, with weights that differ from step to step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(to_json(Config(model=micro.config, data=DataConfig(tokenizer="byte"))))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step in steps:
            model = micro.weights._asdict()
            model["params"] = model["params"] | {"embed": {"table": model["params"]["embed"]["table"] * step}}
            for part in without:
                del model[part]
            optimizer = {"opt_state": {"momentum": np.ones(3, np.float32)}, "step": np.asarray(step, np.int32)}
            checkpoints.save(step, {"model": model, "optimizer": optimizer}, {"data": {}})


@pytest.fixture(scope="module")
def workdir(micro, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    save(folder, micro, steps=(1, 3))
    return folder


@pytest.fixture(scope="module")
def run(workdir):
    return load(workdir)


def test_the_newest_step_or_the_one_asked_for(workdir, run, micro):
    assert run.step == 3 and load(workdir, 1).step == 1
    assert run.config.model == micro.config
    table = micro.weights.params["embed"]["table"]
    np.testing.assert_array_equal(run.weights.params["embed"]["table"], 3 * table)
    np.testing.assert_array_equal(load(workdir, step=1).weights.params["embed"]["table"], table)
    jax.tree.map(np.testing.assert_array_equal, run.weights.bias, micro.weights.bias)


def test_logits_are_the_model_s(run):
    tokens = np.random.default_rng(0).integers(0, 264, (3, 40))
    out = run.logits(tokens)
    assert out.dtype == np.float32 and out.shape == (3, 40, 264)
    assert out.flags.writeable and np.isfinite(out).all()
    np.testing.assert_array_equal(run.logits(tokens.tolist(), np.ones_like(tokens)), out)
    two = np.where(np.arange(40) < 25, 1, 2) * np.ones_like(tokens)
    apart = run.logits(tokens, two)
    np.testing.assert_array_equal(apart[:, :25], out[:, :25])
    assert np.abs(apart[:, 25:] - out[:, 25:]).max() > 0.1


def test_text_in_text_out_ids_in_ids_out(run):
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 4}
    texts = run.generate(PROMPTS, **options)
    ids = run.generate([list(prompt.encode()) for prompt in PROMPTS], **options)
    assert [run.tokenizer.decode(row) for row in ids] == texts
    assert all(isinstance(text, str) for text in texts) and all(len(row) <= 12 for row in ids)
    assert run.generate(PROMPTS, **options) == texts
    assert run.generate(PROMPTS, **options | {"seed": 5}) != texts
    stopped = run.generate(
        [np.frombuffer(prompt.encode(), np.uint8) for prompt in PROMPTS], stop=[ids[0][2]], **options
    )
    assert stopped[0] == ids[0][: ids[0].index(ids[0][2])]
    assert run.generate([]) == []


def test_answers_are_the_generated_texts(run, workdir):
    """One by one with a cache, without one, and all at once; ids for ids."""
    options = {"max_tokens": 6, "temperature": 1.0, "top_p": 0.9, "seed": 4}
    prompts = [f"raise {name}" for name in PROMPTS]
    cache = PrefixCache(block=4)
    answers = list(run.answers(prompts, cache, **options))
    assert [one.text for one in answers] == run.generate(prompts, **options)
    assert [one.reused_tokens for one in answers] == [0, 4, 4]
    ids = [list(prompt.encode()) for prompt in prompts]
    again = list(run.answers(ids, **options))
    assert [one.tokens for one in again] == [one.tokens for one in answers]
    assert [(one.text, one.reused_tokens) for one in again] == 3 * [("", 0)]
    with pytest.raises(ValueError, match="other weights"):
        run_again = load(workdir, 1)
        run_again.answers(prompts, cache)


def test_the_tokenizer_s_stop_tokens_end_a_text(run, monkeypatch):
    options = {"max_tokens": 12, "temperature": 0}
    prompts = [[1, 2, 3], [4, 5], [6]]
    free = run.generate(prompts, stop=(), **options)[0]
    monkeypatch.setitem(run.__dict__, "tokenizer", SimpleNamespace(stop_ids=(free[3],)))
    assert run.generate(prompts, **options)[0] == free[: free.index(free[3])]


def test_generation_leaves_weights_and_bias_alone(run):
    before = jax.tree.map(np.array, run.weights)
    run.generate(PROMPTS, max_tokens=12)
    run.logits(np.ones((3, 40), np.int32))
    jax.tree.map(np.testing.assert_array_equal, before, run.weights)


def test_a_run_of_arrays_in_memory_is_the_loaded_one(workdir, run):
    """As the end of a training makes it; the programs are shared."""
    compiled = run._engine.num_programs
    options = {"max_tokens": 12, "seed": 4}
    again = Run(run.config, *run.weights, step=3)
    assert again.generate(PROMPTS, **options) == run.generate(PROMPTS, **options)
    assert load(workdir, 3).generate(PROMPTS, **options) == run.generate(PROMPTS, **options)
    assert again._engine is run._engine and run._engine.num_programs <= compiled + 3


def test_replies_end_where_a_message_ends(run, monkeypatch):
    """What a prompt becomes, which ids stop it, and what comes back; the model's part is that of `answers`."""
    asked = []

    def answers(prompts, cache, **options):
        asked.append((prompts, options["stop"]))
        close = [260, *b"response", 261]
        turn = [*b"Hm.", 260, *b"think", 261, 259, *b"response", 261, *b"A", *close, 260, *b"message", 261]
        return (Answer(tokens, 0, 0, 0.0, 0.0, 0, 0) for tokens in (turn, turn[:-4]))

    monkeypatch.setattr(run, "answers", answers)
    conversations = [{"messages": [{"role": "user", "content": text}]} for text in ("<|sep|>", "B")]
    whole, cut = run.replies(conversations, effort="none")
    assert whole.text == "[think] Hm.\n[response] A"
    assert whole.reply == Reply({"role": "assistant", "content": "A", "reasoning_content": "Hm."})
    assert cut.reply.message == whole.reply.message and cut.reply.fault == "cut off in message"
    (first, _), stop = asked[0]
    user = [259, *b'message role="user"', 261, *b"<|sep|>", 260, *b"message", 261, 258]
    assert first == [*user, 259, *b'message role="assistant"', 261, 259, *b"think", 261]
    assert list(stop) == [256, 258]
    with pytest.raises(ValueError, match="effort='much': must be one of none, low, high, max"):
        run.replies(conversations, effort="much")
    with pytest.raises(ValueError, match=r"messages\[0\] has the role 'me'"):
        run.replies([{"messages": [{"role": "me"}]}])


def test_loaded_onto_a_mesh(workdir, run):
    mesh = make_mesh({"data": 2, "expert": 4})
    sharded = load(workdir, mesh=mesh)
    for array, whole in zip(*map(jax.tree.leaves, (sharded.weights, run.weights)), strict=True):
        assert array.sharding.mesh == mesh
        np.testing.assert_array_equal(array, whole)
    assert not sharded.weights.params["embed"]["table"].sharding.is_fully_replicated


def test_the_example_in_the_documentation(workdir, monkeypatch):
    (workdir.parent / "runs").symlink_to(workdir.parent)
    monkeypatch.chdir(workdir.parent)
    for described in (load, Run.answers):
        example = doctest.DocTestFinder().find(described, described.__name__, module=run_module)[0]
        assert len(example.examples) >= 4
        assert doctest.DocTestRunner().run(example).failed == 0
    assert k3train.load is load and k3train.Run is Run and k3train.PrefixCache is PrefixCache


def test_what_is_not_a_run_is_refused_by_naming_those_that_are(workdir, tmp_path):
    with pytest.raises(ValueError, match=r"absent is not a run: there is no such folder; runs in .*: tiny"):
        load(workdir.parent / "absent")
    with pytest.raises(ValueError, match=r"holds no config.json; runs in .*: tiny"):
        load(workdir.parent)
    with pytest.raises(ValueError, match=r"there is no such folder; runs in .*: none"):
        load(tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_checkpoint_is_refused(workdir, micro, tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint of step 2 .*complete: 1, 3"):
        load(workdir, 2)
    shutil.copy(workdir / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"no complete checkpoint in"):
        load(tmp_path)


def test_weights_of_another_model_or_without_router_bias_are_refused(workdir, micro, tmp_path):
    save(tmp_path / "no_bias", micro, without=["bias"])
    with pytest.raises(ValueError, match=r"missing\s+bias/backbone/"):
        load(tmp_path / "no_bias")
    shutil.copytree(workdir, tmp_path / "other")
    other = replace(micro.config, hidden_size=64)
    (tmp_path / "other" / "config.json").write_text(to_json(Config(model=other)))
    with pytest.raises(ValueError, match=r"another model"):
        load(tmp_path / "other")
    with pytest.raises(ValueError, match=r"mesh cannot hold the model:\n.*mesh.tensor=8"):
        load(workdir, mesh=make_mesh({"tensor": 8}))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: run.generate("one text"), "one string; must be a list"),
        (lambda run: run.generate(["a", [1]]), "mixes"),
        (lambda run: run.generate(["a", ""]), "prompt 1 holds no tokens"),
        (lambda run: run.generate(["a", "a\udcff"]), "prompt 1 holds half a surrogate pair at character 1"),
        (lambda run: run.generate([[[1]]]), "prompt 0 holds no tokens"),
        (lambda run: run.generate([[1], [264]]), "prompt 1 holds the id 264; the model has 0 to 263"),
        (lambda run: run.generate([[2**40]]), f"holds the id {2**40}"),
        (lambda run: run.generate([[1.5]]), "must be integers"),
        (lambda run: run.generate(["a"], max_tokens=0), "max_tokens=0"),
        (lambda run: run.generate(["a"], temperature=-1), "temperature=-1"),
        (lambda run: run.generate(["a"], top_p=0), "top_p=0"),
        (lambda run: run.generate(["a"], seed=-3), "seed=-3"),
        (lambda run: run.logits([1, 2]), "shape [2]; must be [rows, positions]"),
        (lambda run: run.logits([[1, 2], [3]]), "different lengths"),
        (lambda run: run.logits([[-1]]), "holds the id -1"),
        (lambda run: run.logits([[1, 2]], [[1]]), "segment_ids has the shape [1, 1]"),
        (lambda run: run.logits([[1, 2]], [[1, -1]]), "segment_ids holds -1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(run, call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call(run)
