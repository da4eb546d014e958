"""Train a small Grok-1 on the King James Bible and write it as a released checkpoint.

    python examples/demo_model/train.py OUT [--steps N] [--minutes M] [--seed 0]

Everything lands in OUT: the text, the state of the training (run the command again to go on after
an interruption), `float.safetensors`, and in `checkpoint/` what is shipped.
"""

import dataclasses
import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from evaluate import bits_per_byte, byte_count, cached_logits, expert_shares, nats, windows
from model import TrainedGrok1, balance_loss
from quantise import quantised_weights, write_checkpoint
from safetensors.torch import save_file
from text import Tokens, chapters, fetch_text, split, tokenizer_model, tokens, write_lines
from torch import Tensor
from torch.nn import functional

from export_grok.config import GrokConfig
from export_grok.errors import BuildError, ExportGrokError
from export_grok.export.checkpoint import open_weights
from export_grok.export.load import model_from_index
from export_grok.files import atomic_file, write_json

logger = logging.getLogger("train")

# Real Grok-1 in everything but size; 8 key/value heads let 1, 2, 4 or 8 ranks share them.
CONFIG = GrokConfig(
    num_layers=3,
    emb_size=192,
    num_q_heads=48,
    num_kv_heads=8,
    key_size=8,
    ffn_size=224,
    vocab_size=1024,
    sequence_len=256,
    attn_output_multiplier=8**-0.5,
    embedding_multiplier_scale=192**0.5,
    output_multiplier_scale=3**-0.5,
)

BATCH_TOKENS = 1024
# Length of the windows, from which part of the steps on: attention costs as much as all the rest
# at 128, and most of what is to be learnt lies near.
LENGTHS = ((0.0, 64), (0.6, 128), (0.85, 256))
LEARNING_RATE, WARM_UP, FINAL_RATE = 5e-3, 100, 0.02
WEIGHT_DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0
BALANCE = 0.01
SAVE_EVERY, LOG_EVERY, EVALUATE_EVERY = 250, 50, 500


@dataclass(frozen=True, kw_only=True)
class Options:
    """What decides the result: the same options give the same model, interrupted or not."""

    steps: int = 6000
    seed: int = 0


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step: linear warm-up, then half a cosine."""
    if step < WARM_UP:
        return LEARNING_RATE * (step + 1) / WARM_UP
    way = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LEARNING_RATE * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * way)) / 2)


def batch(text: Tokens, step: int, options: Options) -> Tensor:
    """Return the windows [B, S + 1] of a step; they begin with verses, as a prompt does."""
    length = max(length for way, length in LENGTHS if step >= way * options.steps)
    # Every step draws from a stream of its own, so there is no generator to save.
    random = np.random.default_rng((options.seed, step))
    usable = text.starts[text.starts + length < len(text.ids)]
    first = random.choice(usable, BATCH_TOKENS // length)
    return torch.from_numpy(text.ids[first[:, None] + np.arange(length + 1)])


def optimiser(model: TrainedGrok1) -> torch.optim.AdamW:
    """Return AdamW that lets norms keep their length."""
    norms = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    groups: list[dict[str, Any]] = [
        {"params": others, "weight_decay": WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)


def train(
    model: TrainedGrok1,
    text: Tokens,
    held_out: Tokens,
    state: Path,
    options: Options,
    minutes: float,
) -> bool:
    """Train the model, from the file `state` if it is there, and return whether it is done."""
    adam = optimiser(model)
    first = _resume(model, adam, state, options) if state.exists() else 0
    part = windows(held_out, CONFIG.sequence_len, every=4)
    begin, mean = time.monotonic(), math.nan
    for step in range(first, options.steps):
        rows = batch(text, step, options)
        logits, routings = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        balance = balance_loss(routings)
        adam.zero_grad(set_to_none=True)
        (loss + BALANCE * balance).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, options.steps)
        adam.step()

        done = step + 1
        mean = loss.item() if math.isnan(mean) else 0.98 * mean + 0.02 * loss.item()
        if done % LOG_EVERY == 0:
            rate = (done - first) * BATCH_TOKENS / (time.monotonic() - begin)
            shown = (done, options.steps, mean, balance.item(), rate)
            logger.info("step %d of %d: loss %.3f, balance %.3f, %.0f tokens/s", *shown)
        if done % EVALUATE_EVERY == 0:
            perplexity = math.exp(nats(lambda tokens: model(tokens)[0], part))
            logger.info(
                "step %d: perplexity %.2f on a quarter of what is held out", done, perplexity
            )
        late = time.monotonic() - begin > 60 * minutes
        if done % SAVE_EVERY == 0 or done == options.steps or late:
            saved = {"model": model.state_dict(), "adam": adam.state_dict(), "step": done}
            with atomic_file(state) as file:
                torch.save(saved | {"options": dataclasses.asdict(options)}, file)
        if late and done < options.steps:
            logger.info("%g minutes are over; run the command again to go on", minutes)
            return False
    return True


def _resume(model: TrainedGrok1, adam: torch.optim.AdamW, state: Path, options: Options) -> int:
    saved = torch.load(state, weights_only=True)
    if saved["options"] != dataclasses.asdict(options):
        raise BuildError(
            f"{state} is of a training with {saved['options']}; repeat these options to go on, or "
            "give another folder"
        )
    model.load_state_dict(saved["model"])
    adam.load_state_dict(saved["adam"])
    step: int = saved["step"]
    logger.info("going on after step %d", step)
    return step


def report(model: TrainedGrok1, held_out: Tokens, checkpoint: Path) -> dict[str, Any]:
    """Return how the float model and the int8 one, as it was written, read the held-out text."""
    length = CONFIG.sequence_len
    rows, nbytes = windows(held_out, length), byte_count(held_out, length)
    config, index = open_weights(checkpoint)
    released = cached_logits(model_from_index(config, index, "float32"))
    surprise = {
        "float": nats(lambda tokens: model(tokens)[0], rows),
        "int8": nats(released, rows),
    }
    return {
        "windows": list(rows.shape),
        "perplexity": {kind: math.exp(value) for kind, value in surprise.items()},
        "bits_per_byte": {
            kind: bits_per_byte(value, rows, nbytes) for kind, value in surprise.items()
        },
        "expert_shares": [
            [round(share, 3) for share in layer] for layer in expert_shares(model, rows).tolist()
        ],
        "bytes": sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()),
    }


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--steps", default=Options.steps, show_default=True)
@click.option("--seed", default=Options.seed, show_default=True)
@click.option("--minutes", default=math.inf, help="Stop after so long; run it again to go on.")
@click.option("--threads", default=2, show_default=True)
def main(out: Path, steps: int, seed: int, minutes: float, threads: int) -> None:
    """Train in OUT, and write OUT/checkpoint, OUT/float.safetensors and OUT/report.json."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    try:
        out.mkdir(parents=True, exist_ok=True)
        training, held_out = split(chapters(fetch_text(out)))
        write_lines(out / "held_out.txt", held_out)
        tokenizer = tokenizer_model(training, CONFIG)
        text, unseen = tokens(training, tokenizer), tokens(held_out, tokenizer)
        logger.info("%d tokens to train on, %d held out", len(text.ids), len(unseen.ids))
        model = TrainedGrok1(CONFIG)
        model.initialise()
        options = Options(steps=steps, seed=seed)
        if not train(model, text, unseen, out / "state.pt", options, minutes):
            return
        weights = model.state_dict()
        save_file(weights, out / "float.safetensors")
        write_checkpoint(out / "checkpoint", CONFIG, quantised_weights(CONFIG, weights), tokenizer)
        figures = report(model, unseen, out / "checkpoint")
    except ExportGrokError as error:
        raise click.ClickException(str(error)) from error
    write_json(out / "report.json", figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
