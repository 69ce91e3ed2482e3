"""Trains the demo model from scratch and writes a checkpoint in the layout of the released ones.

Knows batches, the optimizer and the clock. Does not know what the conversations say.
Invariant: it stops in time and always leaves a whole checkpoint.

    python train.py --tokenizer build/tokenizer --output build/checkpoint --minutes 7.5
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from chat_format import Conversation, render
from corpus import N_EXPERTS, TOP_K, evaluation_set, training_set
from model import Config, DemoModel
from quantize import QuantizedWeights
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

LENGTHS = (64, 128, 192, 256, 320)
SHARD_BYTES = 14_000_000
THINK_SHARE, KEPT_SHARE = 0.25, 0.3


@dataclass(slots=True)
class Batches:
    """Padded sequences of one length on the device: ids, and which of them the model learns to write."""

    ids: Tensor
    learn: Tensor


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}; make it with tokenizer.py")
    return int(found)


Arrays = dict[int, tuple[np.ndarray, np.ndarray]]


def encode(conversations: Iterable[Conversation], tokenizer: Tokenizer, rng: random.Random) -> Arrays:
    """Conversations by padded length: ids, and flags of learned tokens. Those longer than all lengths are left out."""
    known: dict[str, list[int]] = {}
    rows: dict[int, list[tuple[list[int], list[bool]]]] = defaultdict(list)
    for conversation in conversations:
        ids: list[int] = []
        learn: list[bool] = []
        pieces = render(conversation, think=rng.random() < THINK_SHARE, keep_blocks=rng.random() < KEPT_SHARE)
        for text, learned in pieces:
            if text not in known:
                if len(known) > 200_000:
                    known.clear()
                known[text] = tokenizer.encode(text, add_special_tokens=False).ids
            ids += known[text]
            learn += [learned] * len(known[text])
        length = next((n for n in LENGTHS if n >= len(ids)), None)
        if length:
            rows[length].append((ids, learn))
    result: Arrays = {}
    for length, items in rows.items():
        all_ids = np.full((len(items), length), token_id(tokenizer, "<|endoftext|>"), np.int16)
        all_learn = np.zeros((len(items), length), bool)
        for i, (ids, learn) in enumerate(items):
            all_ids[i, : len(ids)] = ids
            all_learn[i, : len(learn)] = learn
        result[length] = all_ids, all_learn
    return result


def _encode_part(job: tuple[int, int, str]) -> Arrays:
    seed, count, tokenizer_file = job
    return encode(training_set(seed, count), Tokenizer.from_file(tokenizer_file), random.Random(seed))


def load_data(count: int, workers: int, seed: int, tokenizer_file: str, device: str) -> dict[int, Batches]:
    """Generates and encodes `count` conversations in parallel."""
    jobs = [(seed * 1000 + i, count // workers, tokenizer_file) for i in range(workers)]
    with ProcessPoolExecutor(workers) as pool:
        parts = list(pool.map(_encode_part, jobs))
    data = {}
    for length in LENGTHS:
        ids = np.concatenate([part[length][0] for part in parts if length in part])
        learn = np.concatenate([part[length][1] for part in parts if length in part])
        data[length] = Batches(torch.from_numpy(ids).to(device), torch.from_numpy(learn).to(device))
    return data


def balance_loss(model: DemoModel, real: Tensor) -> Tensor:
    """The balance term of Switch Transformers, over tokens that are not padding: 1 if all experts are used alike."""
    total = torch.zeros((), device=real.device)
    flat = real.flatten().float()
    for block in model.moe_blocks():
        n_experts = block.probabilities.shape[-1]
        picks = torch.zeros(n_experts, device=flat.device)
        picks = picks.scatter_add(0, block.chosen.flatten(), flat.repeat_interleave(block.top_k))
        share = picks / picks.sum()
        mean = (block.probabilities * flat[:, None]).sum(0) / flat.sum()
        total = total + n_experts * (share * mean).sum()
    return total / len(model.moe_blocks())


def loss_of(model: DemoModel, ids: Tensor, learn: Tensor, balance: float, pad: int) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of the learned tokens, and the balance term."""
    logits = model(ids)[:, :-1]
    # Ignored positions instead of selected ones: selecting would make the host wait for the device.
    target = ids[:, 1:].masked_fill(~learn[:, 1:], -100)
    cross = F.cross_entropy(logits.float().flatten(0, 1), target.flatten())
    term = balance_loss(model, ids != pad)
    return cross + balance * term, cross.detach()


@torch.no_grad()
def exact_answers(model: DemoModel, tokenizer: Tokenizer, device: str) -> dict[str, float]:
    """By kind, the share of evaluation answers that greedy decoding would write to the letter."""
    by_length: dict[int, list[tuple[str, list[int], int, int]]] = defaultdict(list)
    for conversation in evaluation_set():
        ids: list[int] = []
        first = last = 0
        for text, learned in render(conversation, think=False):
            start = len(ids)
            ids += tokenizer.encode(text, add_special_tokens=False).ids
            if learned:
                first, last = start, len(ids)
        by_length[-(-len(ids) // 64) * 64].append((conversation.kind, ids, first, last))
    right: dict[str, list[bool]] = defaultdict(list)
    for length, items in by_length.items():
        padded = torch.zeros(len(items), length, dtype=torch.long)
        for row, (_, ids, _, _) in enumerate(items):
            padded[row, : len(ids)] = torch.tensor(ids)
        best = model(padded.to(device)).argmax(-1).cpu()
        for row, (kind, ids, first, last) in enumerate(items):
            right[kind].append(best[row, first - 1 : last - 1].tolist() == ids[first:last])
    return {kind: sum(flags) / len(flags) for kind, flags in sorted(right.items())}


def skew(model: DemoModel, batch: Batches, pad: int) -> list[float]:
    """By layer, the share of picks that the busiest quarter of the experts gets."""
    with torch.no_grad():
        ids = batch.ids[:512].long()
        model.hidden(ids)
    shares = []
    for block in model.moe_blocks():
        real = (ids != pad).flatten()
        picks = torch.bincount(block.chosen[real].flatten(), minlength=block.probabilities.shape[-1])
        top = picks.sort(descending=True).values[: len(picks) // 4]
        shares.append((top.sum() / picks.sum()).item())
    return shares


def save_checkpoint(model: DemoModel, folder: Path, eos_ids: list[int]) -> None:
    """Writes float32 shards, their index and the config, named as in a released checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().float().cpu().contiguous()
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1]["model.language_model." + name] = tensor
        size += tensor.nbytes
    index: dict[str, str] = {}
    total = 0
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text + "\n")
    (folder / "config.json").write_text(json.dumps(model.c.as_json(eos_ids), indent=2) + "\n")


def load_checkpoint(model: DemoModel, folder: Path) -> None:
    """Takes the weights that `save_checkpoint` wrote."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(file)
    model.load_state_dict({name.removeprefix("model.language_model."): tensor for name, tensor in weights.items()})


def train(model: DemoModel, data: dict[int, Batches], arguments: argparse.Namespace, pad: int) -> None:
    """Trains for `arguments.minutes`; the learning rate follows the clock."""
    device = arguments.device
    generator = torch.Generator(device=device).manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": arguments.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), eps=1e-8, fused=device == "cuda")
    quantized = QuantizedWeights(model)
    weights = [batches.ids.numel() for batches in data.values()]
    start, seconds, step, tokens = time.monotonic(), arguments.minutes * 60, 0, 0
    recent = torch.zeros((), device=device)
    progress = 0.0
    while progress < 1 and step < arguments.max_steps:
        warm = min(1.0, (step + 1) / arguments.warmup)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = (
            arguments.lr * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
        )
        length = rng.choices(list(data), weights)[0]
        batches = data[length]
        rows = torch.randint(len(batches.ids), (arguments.batch_tokens // length,), generator=generator, device=device)
        ids, learn = batches.ids[rows].long(), batches.learn[rows]
        rounding = progress >= arguments.quantize_from
        if rounding:
            quantized.swap_in()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            balance = arguments.balance if progress < arguments.balance_until else 0.0
            loss, cross = loss_of(model, ids, learn, balance, pad)
        loss.backward()
        if rounding:
            quantized.swap_out()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent += cross
        step += 1
        tokens += ids.numel()
        if step % arguments.log_every == 0:
            print(
                f"step {step} loss {recent.item() / arguments.log_every:.4f} progress {progress:.3f} "
                f"tokens {tokens / 1e6:.1f}M seconds {time.monotonic() - start:.1f}{' 4-bit' if rounding else ''}",
                flush=True,
            )
            recent.zero_()
        progress = (time.monotonic() - start) / seconds
    print(f"{step} steps, {tokens / 1e6:.1f}M tokens, {time.monotonic() - start:.0f} s")


def main() -> None:
    """Generates, trains, judges, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--conversations", type=int, default=1_500_000)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps until the learning rate is full")
    parser.add_argument("--start-from", type=Path, help="a checkpoint to go on with, instead of random weights")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument(
        "--balance", type=float, default=1e-3, help="weight of the term that spreads tokens over the experts"
    )
    parser.add_argument(
        "--balance-until",
        type=float,
        default=0.05,
        help="share of the time after which it is dropped, so that routing becomes skewed",
    )
    parser.add_argument(
        "--quantize-from", type=float, default=0.5, help="share of the time after which 4-bit weights are felt"
    )
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    pad = token_id(tokenizer, "<|endoftext|>")
    data = load_data(
        arguments.conversations,
        arguments.workers,
        arguments.seed,
        str(arguments.tokenizer / "tokenizer.json"),
        arguments.device,
    )
    sizes = {length: len(batches.ids) for length, batches in data.items()}
    print(f"data {sizes} after {time.monotonic() - start:.0f} s", flush=True)
    model = DemoModel(Config(n_experts=N_EXPERTS, top_k=TOP_K)).to(arguments.device)
    if arguments.start_from:
        load_checkpoint(model, arguments.start_from)
    train(model, data, arguments, pad)
    save_checkpoint(model, arguments.output, [token_id(tokenizer, "<|im_end|>"), pad])
    print(f"saved after {time.monotonic() - start:.0f} s", flush=True)
    quantized = QuantizedWeights(model)
    for name in ("exact", "4-bit"):
        if name == "4-bit":
            quantized.swap_in()
        print(name, "skew", " ".join(f"{share:.2f}" for share in skew(model, data[128], pad)))
        for kind, share in exact_answers(model, tokenizer, arguments.device).items():
            print(f"  {share:6.1%} {kind}", flush=True)


if __name__ == "__main__":
    main()
