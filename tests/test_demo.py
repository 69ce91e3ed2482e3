"""The bundled demo model: it answers, and streaming changes none of its answers.

Real text on real, skewed routes. The oracle is stock mlx-lm on a checkpoint rebuilt from the container's own bytes.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from swiftlet_mlx import load
from swiftlet_mlx.locate import find_model
from swiftlet_mlx.qpack import open_container

EXAMPLE = Path(__file__).parents[1] / "examples" / "demo_model"
TALK = [
    ("What is the capital of Spain?", "Madrid"),
    ("And what about France?", "Paris"),
    ("and its currency?", "euro"),
    ("Who are you?", "swiftlet-mlx"),
    ("Who won the football match yesterday?", "I don't know"),
]
# One layer's four picks, a quarter of the experts, all of them; in GB, with 8 layers of 48 experts of 15,360 bytes.
POOLS = {"smallest": 8 * 4 * 15_360 / 1e9, "quarter": 8 * 12 * 15_360 / 1e9, "all": 0.01}


def say(model: Any, tokenizer: Any, messages: list[dict[str, Any]], **template: Any) -> tuple[list[int], str]:
    """Greedy ids of the next answer up to its end, and their text. mlx-lm thinks unless told not to."""
    template.setdefault("enable_thinking", False)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **template)
    ids = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=80):
        ids.append(int(token))
        if ids[-1] in tokenizer.eos_token_ids:
            break
    return ids, tokenizer.decode(ids[:-1])


def hold_talk(model: Any, tokenizer: Any, turns: int) -> list[tuple[list[int], str]]:
    """The first `turns` of TALK as one conversation."""
    messages: list[dict[str, Any]] = []
    answers = []
    for question, _ in TALK[:turns]:
        messages.append({"role": "user", "content": question})
        answers.append(say(model, tokenizer, messages))
        messages.append({"role": "assistant", "content": answers[-1][1]})
    return answers


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Stock mlx-lm on an ordinary checkpoint made of the container's bytes."""
    folder = tmp_path_factory.mktemp("stock")
    container = open_container(find_model("demo"))
    weights: dict[str, mx.array] = mx.load(str(container.path / "model.safetensors"))  # type: ignore[assignment]
    for table in container.layers.values():
        blobs = np.fromfile(container.path / table.file_name, np.uint8).reshape(table.expert_count, table.stride)
        for part in table.sections:
            raw = np.ascontiguousarray(blobs[:, part.offset : part.offset + part.size])
            array = mx.array(raw.view({"U32": np.uint32, "F32": np.float32}[part.dtype]))
            name = f"language_model.model.layers.{table.layer}.mlp.switch_mlp.{part.name}"
            weights[name] = array.reshape(table.expert_count, *part.shape)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    for file in container.path.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("manifest.json", "hashes.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config.pop("model_file", None)
    (folder / "config.json").write_text(json.dumps(config))
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    return model, tokenizer


@pytest.fixture(scope="module")
def stock_talk(stock: tuple[Any, Any]) -> list[tuple[list[int], str]]:
    return hold_talk(*stock, turns=len(TALK))


def test_demo_answers_what_a_newcomer_types(stock_talk: list[tuple[list[int], str]]) -> None:
    for (question, expected), (_, text) in zip(TALK, stock_talk, strict=True):
        assert expected in text, question


@pytest.mark.parametrize("pool", POOLS)
def test_answers_equal_stock_mlx_lm_at_every_pool_size(pool: str, stock_talk: list[tuple[list[int], str]]) -> None:
    model, tokenizer = load("demo", cache_gb=POOLS[pool])
    assert hold_talk(model, tokenizer, turns=3) == stock_talk[:3]


def test_thinking_writes_a_thought_before_the_answer(stock: tuple[Any, Any]) -> None:
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    _, text = say(*stock, messages, enable_thinking=True)
    thought, _, answer = text.partition("</think>")
    assert "Tokyo" in thought
    assert "Tokyo" in answer


def test_offered_tool_is_called_and_its_result_is_told(stock: tuple[Any, Any]) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather in a city", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    _, text = say(*stock, messages, tools=tools)
    assert (
        text == "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    )
    call = {"name": "get_weather", "arguments": {"city": "Paris"}}
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
    messages.append({"role": "tool", "content": '{"temperature": 21, "condition": "sunny"}'})
    _, text = say(*stock, messages, tools=tools)
    assert "21" in text
    assert "sunny" in text


def test_container_is_small_enough_to_be_bundled_and_sparse_enough_to_stream() -> None:
    container = open_container(find_model("demo"))
    assert sum(file.stat().st_size for file in container.path.rglob("*") if file.is_file()) <= 10_000_000
    assert len(container.layers) == 8
    assert {(table.expert_count, table.stride) for table in container.layers.values()} == {(48, 16_384)}


@pytest.mark.parametrize(
    "text", ["안녕하세요 👋🏽", "東京 and 北京", "🇫🇷 naïve Çelik ½", "a\x00b\t\r\n  c", "N'Djamena, Nukuʻalofa"]
)
def test_every_text_round_trips(text: str, stock: tuple[Any, Any]) -> None:
    _, tokenizer = stock
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_routing_is_skewed_as_in_real_models(stock: tuple[Any, Any]) -> None:
    """Uniform routing would give the busiest quarter of the experts 25 % of the picks, and a pool nothing to win."""
    model, tokenizer = stock
    layer = model.layers[4].mlp
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q}], return_dict=False) for q, _ in TALK]
    seen = []

    class Watched(type(layer)):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            gates = self.gate(x)
            seen.append(np.array(mx.argpartition(gates, kth=-self.top_k, axis=-1)[..., -self.top_k :]).ravel())
            return super().__call__(x)  # type: ignore[no-any-return]

    original, layer.__class__ = type(layer), Watched
    try:
        for prompt in prompts:
            mx.eval(model(mx.array([prompt])))
    finally:
        layer.__class__ = original
    counts = np.bincount(np.concatenate(seen), minlength=48)
    assert np.sort(counts)[-12:].sum() > 0.4 * counts.sum()


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The generator in examples/demo_model; its plain module names do not stay behind."""
    if not EXAMPLE.is_dir():
        pytest.skip("examples/ is not part of this installation")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    before = set(sys.modules)
    yield importlib.import_module("corpus")
    for name in set(sys.modules) - before:
        if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_template_in_the_container_renders_what_the_model_was_trained_on(
    corpus: ModuleType, stock: tuple[Any, Any]
) -> None:
    _, tokenizer = stock
    render = importlib.import_module("chat_format").render
    for conversation in [*corpus.training_set(seed=5, count=300), *corpus.evaluation_set()[-20:]]:
        tools = [json.loads(tool) for tool in conversation.tools_json] or None
        messages = [message.as_dict() for message in conversation.messages]
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert text == "".join(piece for piece, _ in render(conversation, think=True))


def test_evaluation_asks_in_wordings_that_training_never_sees(corpus: ModuleType) -> None:
    normal = importlib.import_module("wording").normal
    trained = {
        normal(m.content) for c in corpus.training_set(seed=3, count=5000) for m in c.messages if m.role == "user"
    }
    # Greetings and sentences in other languages are too short to be held back; they are in both on purpose.
    judged = [c for c in corpus.evaluation_set() if c.kind not in ("greeting", "emoji")]
    asked = {normal(m.content) for c in judged for m in c.messages if m.role == "user"}
    assert not asked & trained


def test_generator_repeats_itself_for_a_seed(corpus: ModuleType) -> None:
    assert list(corpus.training_set(seed=11, count=50)) == list(corpus.training_set(seed=11, count=50))


def test_capitals_are_those_of_the_table(corpus: ModuleType) -> None:
    by_name = {country.bare: country.capital for country in corpus.COUNTRIES}
    assert len(by_name) == 197
    known = {
        "Australia": "Canberra",
        "Brazil": "Brasília",
        "Kazakhstan": "Astana",
        "Myanmar": "Naypyidaw",
        "Turkey": "Ankara",
    }
    assert known.items() <= by_name.items()
