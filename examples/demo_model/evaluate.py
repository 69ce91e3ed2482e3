"""Judges a demo model by its answers, its routing and its agreement with the other implementations.

Knows how to run mlx-lm and what a right answer contains. Does not know how the model was trained.
Invariant: greedy decoding, so the same weights give the same table.

    python evaluate.py build/demo-4bit --routes
    python evaluate.py build/checkpoint --reference
    python evaluate.py ../../swiftlet_mlx/demo/demo.qpack --cache-gb 0.003
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from chat_format import Conversation
from corpus import evaluation_set
from mlx_lm.generate import generate_step

Routes = list[list[list[int]]]  # [step][layer] -> experts, one forward pass a step


def load_model(path: str, cache_gb: float | None) -> tuple[Any, Any]:
    """A container goes through swiftlet_mlx, anything else through mlx-lm."""
    if cache_gb is not None or path.rstrip("/").endswith(".qpack") or path == "demo":
        from swiftlet_mlx import load as load_streamed

        model, tokenizer = load_streamed(path, cache_gb=cache_gb)
        return model, tokenizer
    from mlx_lm import load

    model, tokenizer = load(path)[:2]
    return model, tokenizer


def answer(model: Any, tokenizer: Any, conversation: Conversation, *, think: bool = False, limit: int = 96) -> str:
    """What the model says instead of the last message of `conversation`."""
    tools = [json.loads(tool) for tool in conversation.tools_json] or None
    messages = [message.as_dict() for message in conversation.messages[:-1]]
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, enable_thinking=think, tokenize=True, return_dict=False
    )
    ids: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=limit):
        if int(token) in tokenizer.eos_token_ids:
            break
        ids.append(int(token))
    text: str = tokenizer.decode(ids)
    return text.split("</think>")[-1].strip() if think else text


def is_right(text: str, conversation: Conversation) -> bool:
    """Refusals need one of the expected phrases, everything else all of them."""
    check: Callable[..., bool] = any if conversation.kind == "refusal, other topics" else all
    return check(part in text for part in conversation.expected)


def judge(
    model: Any, tokenizer: Any, conversations: Sequence[Conversation], *, think: bool, failures: int
) -> dict[str, tuple[int, int]]:
    """By kind: right answers and all answers. Prints up to `failures` wrong ones a kind."""
    table: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for conversation in conversations:
        text = answer(model, tokenizer, conversation, think=think)
        row = table[conversation.kind]
        row[1] += 1
        if is_right(text, conversation):
            row[0] += 1
        elif row[1] - row[0] <= failures:
            asked = " | ".join(message.content for message in conversation.messages[:-1] if message.role == "user")
            print(
                f"  {conversation.kind}: {asked}\n      said {text!r}\n      need {conversation.expected}",
                file=sys.stderr,
            )
    return {kind: (right, total) for kind, (right, total) in table.items()}


class RouteRecorder:
    """Watches which experts the router of each layer picks, without changing anything."""

    def __init__(self, model: Any) -> None:
        self.routes: Routes = []
        blocks = [layer.mlp for layer in model.layers]
        self._places = {id(block): i for i, block in enumerate(blocks)}
        kind = type(blocks[0])
        original = kind.__call__
        recorder = self

        def call(block: Any, x: mx.array) -> mx.array:
            place = recorder._places.get(id(block))
            if place is not None:
                gates = mx.softmax(block.gate(x), axis=-1, precise=True)
                best = mx.argpartition(gates, kth=-block.top_k, axis=-1)[..., -block.top_k :]
                if place == 0:
                    recorder.routes.append([])
                recorder.routes[-1].append(np.array(best).ravel().tolist())
            result: mx.array = original(block, x)
            return result

        kind.__call__ = call


def busiest_quarter(routes: Routes, n_experts: int) -> list[float]:
    """By layer, the share of picks that go to the busiest quarter of the experts."""
    shares = []
    for layer in range(len(routes[0])):
        counts = Counter(expert for step in routes for expert in step[layer])
        shares.append(sum(count for _, count in counts.most_common(n_experts // 4)) / sum(counts.values()))
    return shares


def hit_rate(routes: Routes, slots: int, policy: str) -> float:
    """Replays decode steps against `slots` places a layer; policy "lru", or "lfu" with recency as tie-break."""
    hits = total = 0
    for layer in range(len(routes[0])):
        resident: OrderedDict[int, int] = OrderedDict()  # expert -> uses, in the order of last use
        uses: Counter[int] = Counter()
        for step in routes:
            needed = set(step[layer])
            total += len(needed)
            hits += sum(expert in resident for expert in needed)
            for expert in sorted(needed):
                uses[expert] += 1
                if expert in resident:
                    resident.move_to_end(expert)
                    continue
                if len(resident) >= slots:
                    candidates = [e for e in resident if e not in needed]
                    victim = candidates[0] if policy == "lru" else min(candidates, key=lambda e: uses[e])
                    del resident[victim]
                resident[expert] = 1
    return hits / total


def compare_with_transformers(folder: str, conversations: Sequence[Conversation]) -> None:
    """The float checkpoint in transformers (PyTorch) and in mlx-lm: how far the logits differ over some prompts."""
    import torch
    from mlx_lm import load
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    model, _ = load(folder)[:2]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text_config = json.loads((Path(folder) / "config.json").read_text())["text_config"]
    reference = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**text_config)).eval().float()
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        weights |= {name.replace("model.language_model.", "model."): t for name, t in load_file(file).items()}
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    reference.tie_weights()
    print(f"transformers: missing {missing}, unexpected {unexpected}")
    for conversation in conversations:
        ids = tokenizer.apply_chat_template(
            [m.as_dict() for m in conversation.messages], tokenize=True, return_dict=False
        )
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0]
        got = torch.tensor(model(mx.array([ids]))[0].tolist())
        same = (got.argmax(-1) == expected.argmax(-1)).float().mean().item()
        print(
            f"  {len(ids)} tokens: largest difference {(got - expected).abs().max():.2e} "
            f"of {expected.abs().max():.1f}, same best token {same:.1%}"
        )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder or container")
    parser.add_argument("--cache-gb", type=float, help="pool size, through swiftlet_mlx")
    parser.add_argument("--limit", type=int, default=10**6, help="conversations a kind")
    parser.add_argument("--thinking", action="store_true")
    parser.add_argument("--failures", type=int, default=3, help="wrong answers shown a kind")
    parser.add_argument(
        "--routes", action="store_true", help="also the skew of routing and hit rates (stock mlx-lm only)"
    )
    parser.add_argument(
        "--reference", action="store_true", help="compare the logits of transformers and mlx-lm instead"
    )
    arguments = parser.parse_args()
    seen: Counter[str] = Counter()
    chosen = []
    for conversation in evaluation_set():
        seen[conversation.kind] += 1
        if seen[conversation.kind] <= arguments.limit:
            chosen.append(conversation)
    if arguments.reference:
        compare_with_transformers(arguments.model, [chosen[i] for i in range(0, len(chosen), len(chosen) // 6)])
        return
    model, tokenizer = load_model(arguments.model, arguments.cache_gb)
    recorder = RouteRecorder(model) if arguments.routes else None
    start = time.monotonic()
    table = judge(model, tokenizer, chosen, think=arguments.thinking, failures=arguments.failures)
    for kind, (right, total) in table.items():
        print(f"| {kind} | {right} of {total} | {right / total:.1%} |")
    print(f"{sum(t for _, t in table.values())} answers in {time.monotonic() - start:.0f} s")
    if recorder:
        n_experts = model.layers[0].mlp.num_experts
        decode = [step for step in recorder.routes if len(step[0]) == model.layers[0].mlp.top_k]
        print("busiest quarter:", " ".join(f"{share:.0%}" for share in busiest_quarter(recorder.routes, n_experts)))
        for share in (4, 2):
            slots = n_experts // share
            rates = ", ".join(f"{policy} {hit_rate(decode, slots, policy):.1%}" for policy in ("lru", "lfu"))
            print(f"decode hits with {slots} of {n_experts} experts a layer resident: {rates}")


if __name__ == "__main__":
    main()
