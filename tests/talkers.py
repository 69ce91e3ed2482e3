"""Small models and tokenizers for the conversation tests: made here, in memory, from fixed seeds.

`tokenizer()` is byte-level BPE with a ChatML template, `random_model()` a stock mlx-lm architecture with random
float32 weights, `Scripted` a model that says what it is told to, whatever it is asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, qwen3_coder
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from swiftlet_mlx.engine import Engine

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CORPUS = [
    "Hello world, the quick brown fox jumps over the lazy dog. What is the answer? It is forty two.",
    "You are a helpful assistant. user system assistant tool thinking about the question, then an answer.",
]

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}\
{%- endif %}{{ '# Tools\\n' }}{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'system' %}{%- if not loop.first %}STRICT_SYSTEM{%- endif %}
{%- elif m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}THOUGHTS{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>\\n' }}CALL{{ '\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content }}\
{{ '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ raise_exception('Unexpected message role.') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}OPENING{%- endif %}"""

STRICT = "{{ raise_exception('System message must be at the beginning.') }}"
ANYWHERE = "{{ '<|im_start|>system\\n' + m.content + '<|im_end|>\\n' }}"
KEPT_THOUGHTS = (
    "{%- if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
)
JSON_CALL = "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + (c.function.arguments | tojson) + '}' }}"
XML_CALL = (
    "{{ '<function=' + c.function.name + '>\\n' }}{%- for k, v in c.function.arguments | items %}"
    "{{ '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}{%- endfor %}"
    "{{ '</function>' }}"
)
OPENINGS = {
    "none": "",
    "always": "{{ '<think>\\n' }}",
    "switch": "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{%- else %}{{ '<think>\\n' }}{%- endif %}",
}


def chat_template(opening: str = "none", *, strict: bool = True, xml: bool = False) -> str:
    """A ChatML template. opening: none, always (it opens a thought), switch (enable_thinking)."""
    return (
        CHATML.replace("STRICT_SYSTEM", STRICT if strict else ANYWHERE)
        .replace("THOUGHTS", "" if opening == "none" else KEPT_THOUGHTS)
        .replace("CALL", XML_CALL if xml else JSON_CALL)
        .replace("OPENING", OPENINGS[opening])
    )


@lru_cache(maxsize=1)
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False) for t in MARKUP])
    return str(tokenizer.to_str())


def tokenizer(template: str | None = None, *, xml: bool = False, eos: str = "<|im_end|>") -> TokenizerWrapper:
    """mlx-lm's wrapper around byte-level BPE with Qwen's markup tokens. `template` "" means none."""
    inner = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained()), eos_token=eos)
    inner.add_special_tokens({"additional_special_tokens": SPECIAL})
    inner.chat_template = chat_template(xml=xml) if template is None else template or None
    parser = qwen3_coder if xml else json_tools
    return TokenizerWrapper(
        inner,
        BPEStreamingDetokenizer,
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
        tool_parser=parser.parse_tool_call,
    )


N_VOCAB = 384


def random_model(kind: str = "qwen3_next", seed: int = 0) -> nn.Module:
    """A stock mlx-lm model with random float32 weights, four layers at most, hidden size 32."""
    common = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "vocab_size": N_VOCAB,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    }  # fmt: skip
    linear = {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 16, "partial_rotary_factor": 0.5,
        "full_attention_interval": 2, "num_hidden_layers": 4,
    }  # fmt: skip
    mx.random.seed(seed)
    model: nn.Module
    if kind == "qwen3_next":
        from mlx_lm.models import qwen3_next

        model = qwen3_next.Model(qwen3_next.ModelArgs.from_dict({"model_type": kind, **common, **linear}))
    elif kind == "qwen3_5_moe":
        from mlx_lm.models import qwen3_5_moe

        text = {
            "model_type": "qwen3_5_moe_text", **common, **linear,
            "rope_parameters": {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4,
                                "partial_rotary_factor": 0.5},
        }  # fmt: skip
        model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict({"model_type": kind, "text_config": text}))
    else:
        from mlx_lm.models import qwen3_moe

        model = qwen3_moe.Model(
            qwen3_moe.ModelArgs.from_dict({"model_type": "qwen3_moe", **common, "num_hidden_layers": 2})
        )
    # Larger than the usual initialisation, so that logits are far apart and greedy choices are not ties.
    model.update(tree_map(lambda p: p * 3.0 if p.ndim > 1 else p, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


class Args:
    """What the engine looks up in a model's arguments."""

    def __init__(self, context: int) -> None:
        self.vocab_size = N_VOCAB
        self.max_position_embeddings = context


class Scripted(nn.Module):  # type: ignore[misc] # mlx.nn has no types
    """Says given ids, one reply after another (the last one again and again), whatever the prompt; then its end token.

    Has one key-value and one recurrent cache, as a hybrid model. A reply begins when it is fed a token that it has
    not just said; two such tokens one by one are the end of one prompt. `on_step(i)` is called before the i-th token of
    a reply and may wait or raise.
    """

    def __init__(
        self,
        replies: Sequence[Sequence[int]],
        eos: int,
        *,
        context: int = 4096,
        on_step: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__()
        self.args = Args(context)
        self._replies = [[*r, eos] for r in replies]
        self._eos = eos
        self._on_step = on_step
        self._said: int | None = None
        self._reply = -1
        self._step = 0
        self._one_by_one = False

    @property
    def layers(self) -> list[Any]:
        return [None, None]

    def make_cache(self) -> list[Any]:
        return [KVCache(), ArraysCache(size=1)]

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        ids = inputs[0].astype(mx.float32)
        n = ids.size
        cache[0].update_and_fetch(ids[None, None, :, None], ids[None, None, :, None])
        before = cache[1][0] if cache[1][0] is not None else mx.zeros((1, 1))
        cache[1][0] = before + ids.sum()
        said = self._eos
        if n == 1:
            if inputs[0, 0].item() != self._said:
                if not (self._one_by_one and self._step == 1):
                    self._reply = min(self._reply + 1, len(self._replies) - 1)
                self._step = 0
            if self._on_step is not None:
                self._on_step(self._step)
            script = self._replies[self._reply]
            said = script[min(self._step, len(script) - 1)]
            self._step += 1
            self._said = said
        self._one_by_one = n == 1
        logits = mx.full((1, n, N_VOCAB), -10.0)
        logits[0, -1, said] = 10.0
        return logits


def fresh_logits(model: nn.Module, ids: Sequence[int]) -> list[float]:
    """The next-token logits after reading ids in one go with empty caches."""
    from mlx_lm.models.cache import make_prompt_cache

    out = model(mx.array([list(ids)]), cache=make_prompt_cache(model))[0, -1].astype(mx.float32)
    values: list[float] = out.tolist()
    assert all(math.isfinite(v) for v in values)
    return values


def until_idle(engine: Engine) -> None:
    """Wait until the engine has nothing more to do, reading ahead included."""
    worker = engine._worker
    for _ in range(3):  # what was taken from the queue may not be running yet
        while worker._ahead or worker._running is not None:
            time.sleep(0.001)
        time.sleep(0.001)
