"""The front door: prompts in every form, faults, options, interruption."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig, RandomWeights, SamplingParams
from lockstep.errors import CheckpointError, ConfigError, LockstepError, RequestError
from tests.checkpoints import BASE, MOE, save
from tests.engines import WITNESS
from tests.scripted import scripted

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FIELDS: dict[str, Any] = {"model_type": "nemotron_h", **BASE, **MOE}
SMALL = EngineConfig(max_requests=4, max_tokens_per_step=64, num_blocks=64)


@cache
def demo() -> LLM:
    """The packaged model; tests leave nothing in flight."""
    return LLM("demo", device="cpu", config=SMALL, verbose=False)


def random_model(seed: int = 0, **options: Any) -> LLM:
    """A model of random weights, without a folder."""
    settings: dict[str, Any] = {"device": "cpu", "engine_config": SMALL}
    settings |= {"verbose": False, **options}
    return LLM.from_config(FIELDS, weights=replace(WITNESS, seed=seed), **settings)


def test_one_prompt_of_text() -> None:
    """Text in, text out; the ids are the tokenizer's."""
    llm = demo()
    (output,) = llm.generate("The rest is silence.", GREEDY)
    assert output.prompt_token_ids == llm.tokenizer.encode("The rest is silence.")
    assert len(output.token_ids) == GREEDY.max_tokens
    assert output.text == llm.tokenizer.decode(output.token_ids)


def test_prompts_in_every_form() -> None:
    """Text and ids, one or several, in order; company changes nothing."""
    llm = demo()
    ids = llm.tokenizer.encode("Words, words, words.")
    (alone,) = llm.generate(ids, GREEDY)
    together = llm.generate(["To be", ids, "Words, words, words."], GREEDY)
    assert [len(output.prompt_token_ids) for output in together[1:]] == [len(ids)] * 2
    assert alone.token_ids == together[1].token_ids == together[2].token_ids
    assert llm.generate([], GREEDY) == []


def test_sampling_parameters_for_each() -> None:
    """One set for all prompts, one for each, or the defaults."""
    llm = demo()
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = llm.generate(["To be", "or not to be"], lengths)
    assert [len(output.token_ids) for output in outputs] == [1, 5]
    (output,) = llm.generate("To be")
    assert 1 <= len(output.token_ids) <= SamplingParams().max_tokens
    with pytest.raises(RequestError, match="2 prompts came with 1 sampling"):
        llm.generate(["To be", "or not to be"], [GREEDY])


def test_every_fault_is_listed_before_anything_starts() -> None:
    """All prompts are checked first; one error names each that is refused."""
    llm = demo()
    prompts: Any = ["fine", [], [2048], 7, [1] * 5000]
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, GREEDY)
    lines = str(caught.value).splitlines()
    refused = [line.split(":")[0] for line in lines]
    assert refused == ["prompt 1", "prompt 2", "prompt 3", "prompt 4"]
    assert "empty" in lines[0]
    assert "2048" in lines[1]
    assert "not int" in lines[2]
    assert "max_length is 4096" in lines[3]
    assert not llm.engine.has_work


def test_an_interruption_aborts_what_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C leaves an engine with nothing in flight and every block free."""
    llm = random_model()
    step = llm.engine.step
    count = 0

    def interrupted() -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3], [4, 5]], GREEDY)
    assert not llm.engine.has_work
    llm.engine.check_integrity()
    monkeypatch.undo()
    assert len(llm.generate([1, 2, 3], GREEDY)[0].token_ids) == GREEDY.max_tokens


def test_deltas_join_to_the_output() -> None:
    """Text, tokens and log-probabilities of all deltas are those of the output."""
    llm = demo()
    sampling = replace(GREEDY, logprobs=2)
    deltas = list(llm.stream("The rest is silence.", sampling))
    *others, last = deltas
    assert last.output is not None
    assert all(delta.output is None for delta in others)
    assert "".join(delta.text for delta in deltas) == last.output.text
    assert [t for delta in deltas for t in delta.token_ids] == last.output.token_ids
    values = [value for delta in deltas for value in delta.logprobs or ()]
    assert values == last.output.logprobs
    assert len(values) == GREEDY.max_tokens
    assert {delta.request_id for delta in deltas} == {last.output.request_id}
    (whole,) = llm.generate("The rest is silence.", sampling)
    assert (whole.text, whole.token_ids) == (last.output.text, last.output.token_ids)


def test_prompts_stream_side_by_side() -> None:
    """Deltas of several prompts alternate, and say whose they are."""
    llm = demo()
    deltas = list(llm.stream(["To be", "or not to be"], GREEDY))
    order = [delta.index for delta in deltas]
    assert order[:4] == [0, 1, 0, 1]
    for index, output in enumerate(llm.generate(["To be", "or not to be"], GREEDY)):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == output.text
        assert mine[-1].output is not None


def test_streams_may_be_open_side_by_side() -> None:
    """A step serves all; a call in the middle of a stream takes nothing from it."""
    llm = demo()
    alone = [llm.generate(prompt, GREEDY)[0].text for prompt in ("To be", "My lord")]
    first, second = llm.stream("To be", GREEDY), llm.stream("My lord", GREEDY)
    texts = [next(first).text, next(second).text]
    assert llm.generate("Words, words", GREEDY)[0].text
    texts[1] += "".join(delta.text for delta in second)
    texts[0] += "".join(delta.text for delta in first)
    assert texts == alone
    assert not llm.engine.has_work


def test_closing_a_stream_aborts_what_is_left() -> None:
    """Also one that never began; the engine holds nothing afterwards."""
    llm = random_model()
    deltas = llm.stream([[1, 2, 3], [4, 5]], GREEDY)
    next(deltas)
    assert llm.engine.has_work
    deltas.close()
    assert not llm.engine.has_work
    llm.engine.check_integrity()
    llm.stream([1, 2], GREEDY).close()
    assert not llm.engine.has_work


def test_abort_ends_one_stream() -> None:
    """The stream ends with what there is; the others go on."""
    llm = demo()
    deltas = llm.stream(["To be", "My lord"], GREEDY)
    first = next(deltas)
    aborted = llm.abort(first.request_id)
    assert aborted is not None
    assert (aborted.finish_reason, aborted.text) == ("abort", first.text)
    outputs = {d.index: d.output for d in deltas if d.output is not None}
    assert outputs[0] == aborted
    assert outputs[1].finish_reason == "length"
    assert llm.abort(first.request_id) is None


def test_a_stream_whose_engine_was_emptied_says_so() -> None:
    """It does not wait for what will never come."""
    llm = demo()
    deltas = llm.stream("To be", GREEDY)
    next(deltas)
    llm.engine.reset()
    with pytest.raises(RequestError, match="engine was emptied"):
        next(deltas)


def test_stream_checks_before_anything_starts() -> None:
    """The call itself raises, not the first delta."""
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        demo().stream(["fine", []], GREEDY)


SPEECH = "One two three. Four five six."


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("two three. F", "One "),
        (["six", "three"], "One two "),
        ("e two", "On"),
        (["seven"], SPEECH),
        (".", "One two three"),
    ],
)
def test_stop_strings_end_a_text(stop: Any, text: str) -> None:
    """At once, wherever in a token they end; token ids stay as they were drawn."""
    llm, sampling = scripted(SPEECH, stop=stop)
    deltas = list(llm.stream([1, 2, 3], sampling))
    output = deltas[-1].output
    assert output is not None
    assert "".join(delta.text for delta in deltas) == output.text == text
    said = llm.tokenizer.decode(output.token_ids)
    shorter = llm.tokenizer.decode(output.token_ids[:-1])
    assert SPEECH.startswith(said)
    stops = [stop] if isinstance(stop, str) else stop
    found = [each for each in stops if each in said]
    assert output.finish_reason == ("stop" if found else "length")
    assert not [each for each in found if each in shorter]


def test_stop_strings_and_least_tokens() -> None:
    """`min_tokens` holds back end ids; a stop string ends a text at any length."""
    llm, sampling = scripted(SPEECH, stop="two", min_tokens=8)
    (output,) = llm.generate([1, 2, 3], sampling)
    assert (output.text, output.finish_reason) == ("One ", "stop")
    assert len(output.token_ids) < 8


def test_a_stop_string_in_the_last_token() -> None:
    """It counts, though the request has reached its length as well."""
    llm, sampling = scripted("One two three", stop="three")
    (output,) = llm.generate([1, 2, 3], sampling)
    assert (output.text, output.finish_reason) == ("One two ", "stop")


def test_messages_are_prompts_too() -> None:
    """One conversation or several, among other prompts; chat takes nothing else."""
    llm = demo()
    messages = [{"role": "user", "content": "Who's there?"}]
    ids = llm.tokenizer.apply_chat_template(messages)
    (output,) = llm.generate(messages, GREEDY)
    assert output.prompt_token_ids == ids
    outputs = llm.generate([messages, "To be", ids], GREEDY)
    assert [o.token_ids for o in outputs[::2]] == [output.token_ids] * 2
    assert llm.chat(messages, GREEDY)[0].token_ids == output.token_ids
    assert len(llm.chat([messages, messages], GREEDY)) == 2
    text: Any = "Who's there?"
    with pytest.raises(RequestError, match="chat takes messages"):
        llm.chat(text, GREEDY)
    with pytest.raises(RequestError, match="prompt 0: these messages cannot be used"):
        llm.chat([{"role": "assistant"}], GREEDY)


def test_a_model_without_tokenizer_serves_ids_alone(tmp_path: Path) -> None:
    """Text in or out is one clear error."""
    llm = LLM(save(tmp_path, {}), device="cpu", config=SMALL, verbose=False)
    (output,) = llm.generate([1, 2, 3], GREEDY)
    assert len(output.token_ids) == GREEDY.max_tokens
    assert output.text == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("To be", GREEDY)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.tokenizer.decode(output.token_ids)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([1, 2, 3], replace(GREEDY, stop="To be"))
    (delta, *_) = llm.stream([1, 2, 3], GREEDY)
    assert (delta.text, len(delta.token_ids)) == ("", 1)


def test_random_weights() -> None:
    """The seed decides the weights; a config may be fields or a `ModelConfig`."""
    prompt = [5, 6, 7]
    first = random_model()
    (expected,) = first.generate(prompt, GREEDY)
    (again,) = random_model().generate(prompt, GREEDY)
    (other,) = random_model(seed=1).generate(prompt, GREEDY)
    assert expected.token_ids == again.token_ids
    assert expected.token_ids != other.token_ids
    same = LLM(
        first.model_config,
        weights=WITNESS,
        device="cpu",
        config=SMALL,
        verbose=False,
    )
    assert same.generate(prompt, GREEDY)[0].token_ids == expected.token_ids


def test_a_component_can_be_replaced() -> None:
    """One engine alone gets the replacement."""
    calls: list[int] = []

    def activate(features: torch.Tensor, activation: str) -> torch.Tensor:
        calls.append(len(features))
        return torch.relu(features) ** 2

    llm = random_model(components={"mlp.activate": activate})
    (output,) = llm.generate([5, 6, 7], GREEDY)
    assert calls
    calls.clear()
    assert random_model().generate([5, 6, 7], GREEDY)[0].token_ids == output.token_ids
    assert not calls


def test_dtypes() -> None:
    """Float32 on a CPU unless asked for otherwise; the plan follows."""
    assert demo().dtype == torch.float32
    assert demo().model_config.dtype == "bfloat16"
    narrow = random_model(dtype="bfloat16")
    assert narrow.sizes.bytes_per_block * 2 == random_model().sizes.bytes_per_block
    assert len(narrow.generate([1, 2], GREEDY)[0].token_ids) == GREEDY.max_tokens


def test_engine_options_by_name() -> None:
    """They go on top of the config, in both constructors; a misspelt one is refused."""
    llm = random_model(max_requests=2)
    assert (llm.sizes.max_requests, llm.sizes.num_blocks) == (2, SMALL.num_blocks)
    same = LLM(
        llm.model_config, device="cpu", config=SMALL, verbose=False, max_requests=2
    )
    assert same.sizes == llm.sizes
    with pytest.raises(ConfigError, match="unknown option 'max_request'; known are"):
        LLM(llm.model_config, verbose=False, max_request=2)


def no_folder() -> LLM:
    """Name a folder that is not there."""
    return LLM("no/such/folder", verbose=False)


def weights_for_a_folder() -> LLM:
    """Ask for random weights and a checkpoint at once."""
    return LLM("demo", weights=RandomWeights(), device="cpu", verbose=False)


BAD_OPTIONS = {
    "folder": (no_folder, CheckpointError, "'no/such/folder' is not a folder"),
    "weights": (weights_for_a_folder, ConfigError, "go with a config"),
    "device": (lambda: random_model(device="tpu9"), ConfigError, "device is 'tpu9'"),
    "no device": (lambda: random_model(device=None), ConfigError, "device is None"),
    "no memory": (lambda: random_model(device="meta"), ConfigError, "'meta'; use"),
    "dtype": (lambda: random_model(dtype="int8"), ConfigError, "dtype is 'int8'"),
    "backend": (lambda: random_model(backend="fast"), ConfigError, "backend is 'fast'"),
    "component": (
        lambda: random_model(components={"scan.fast": print}),
        ConfigError,
        "unknown components",
    ),
    "no component": (
        lambda: random_model(components={"scan.scan_prefill": 5}),
        ConfigError,
        "scan.scan_prefill=5 is neither a function nor a class",
    ),
}


@pytest.mark.parametrize("backend", ["reference", "optimized"])
def test_threads_share_a_model(backend: str) -> None:
    """Each gets its own outputs, and steps serve several of them."""
    llm = random_model(backend=backend, debug=("integrity",))
    prompts = [[seed + 1, 2, 3] for seed in range(4)]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, seed=4)
    expected = [llm.generate(prompt, sampling)[0].token_ids for prompt in prompts]
    step, rows = llm.engine.step, list[int]()

    def noted() -> Any:
        rows.append(len((record := step()).rows))
        return record

    llm.engine.step = noted
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(
            threads.map(lambda prompt: llm.generate(prompt, sampling), prompts)
        )
    assert [outputs[0].token_ids for outputs in found] == expected
    assert max(rows) > 1 and not llm.engine.has_work


@pytest.mark.parametrize("sampling", [{"temperature": 0}, [None], ["greedy"]])
def test_what_is_no_sampling(sampling: Any) -> None:
    """It is refused before anything is started."""
    with pytest.raises(RequestError, match="are SamplingParams, not"):
        random_model().generate([[1, 2]], sampling)


def test_half_a_character_is_no_text() -> None:
    """No file can hold it; it comes of names of files, or of JSON."""
    with pytest.raises(RequestError, match="prompt 0: this text is not valid Unicode"):
        demo().generate("a\ud800")


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, b"text", iter(["text"])])
def test_what_is_no_prompt_at_all(prompts: Any) -> None:
    """It is named for what it is."""
    with pytest.raises(RequestError, match=f"not {type(prompts).__name__}"):
        random_model().generate(prompts)


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name: str) -> None:
    """Each has an error of its own."""
    build, error, message = BAD_OPTIONS[name]
    assert issubclass(error, LockstepError)
    with pytest.raises(error, match=message):
        build()


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that torch cannot use is refused before anything is loaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        random_model(device="cuda")


def test_the_memory_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, so that what a program prints stays its own; not where unwanted."""
    random_model(verbose=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "nemotron_h MEM*EM-E" in err
    assert "64 x 16 tokens" in err
    assert "float32 on cpu" in err
    random_model()
    assert capsys.readouterr().err == ""


def test_a_feature_that_can_do_nothing_warns() -> None:
    """Without snapshots a hybrid model skips nothing, and somebody is told."""
    with pytest.warns(UserWarning, match="no snapshot slots"):
        random_model(engine_config=EngineConfig(snapshot_slots=0, num_blocks=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        random_model()


def test_progress_is_shown_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bars go to a terminal; outputs are the same."""
    plain = random_model().generate([[1, 2], [3]], GREEDY)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    shown = random_model(verbose=True).generate([[1, 2], [3]], GREEDY)
    assert [o.token_ids for o in shown] == [o.token_ids for o in plain]
    assert "generating" in capsys.readouterr().err
