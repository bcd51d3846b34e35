"""Does QLoRA need float32 copies? Losses and memory of each preparation: python benchmarks/quantized.py

A small Llama is trained on docstrings of the standard library, saved in bfloat16 and loaded in 4 bits (nf4, double
quantisation). Then the stock Trainer trains adapters on other docstrings in bfloat16 autocast, after PEFT's
``prepare_model_for_kbit_training`` and after ``prepare_quantized``. The reference is the same run in float32
throughout; another seed shows what is noise. The memory is estimated, of Llama-3.1-8B on an 8 GB GPU.

    python benchmarks/quantized.py [--steps 80]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results_file import markdown, show

BLOCK_TOKENS, BATCH_SIZE, UPDATES_OF_BASE, HELD_OUT = 128, 8, 100, 64
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4}
ESTIMATED = {"model": "Llama-3.1-8B", "batch_size": 1, "seq_len": 512, "gpu": "RTX 4060 8GB", "checkpointing": True}
ESTIMATED |= {"load_in": "nf4", "optim": "paged_adamw_8bit", "precision": "bf16", "weights_dtype": "bfloat16"}

Preparation = Callable[[Any], Any]


def adapted(model: Any) -> Any:
    """Return a model with adapters on its linear layers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def of_peft(model: Any) -> Any:
    """Prepare as PEFT does: every 16-bit parameter becomes float32."""
    from peft import prepare_model_for_kbit_training

    return adapted(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))


def ours(model: Any) -> Any:
    """Prepare with ``prepare_quantized``."""
    from hf_memopt import prepare_quantized

    wrapped = adapted(model)
    prepare_quantized(wrapped)
    return wrapped


PREPARATIONS: dict[str, Preparation] = {"peft's prepare_model_for_kbit_training": of_peft, "prepare_quantized": ours}


def token_blocks(texts: list[str]) -> tuple[int, list[dict[str, torch.Tensor]]]:
    """Return the size of a vocabulary, and the texts one after the other in blocks of ``BLOCK_TOKENS``."""
    from demo_task import train_tokenizer

    tokenizer = train_tokenizer(texts)
    tokenizer.model_max_length = 10**9  # the blocks are cut here
    ids = torch.tensor([token for row in tokenizer(texts)["input_ids"] for token in row])
    rows = ids[: len(ids) // BLOCK_TOKENS * BLOCK_TOKENS].view(-1, BLOCK_TOKENS)
    return len(tokenizer), [{"input_ids": row, "labels": row} for row in rows]


def train(model: Any, rows: list[dict[str, torch.Tensor]], folder: Path, steps: int, **settings: Any) -> list[float]:
    """Train with the stock Trainer and return the loss of each step."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=steps,
        per_device_train_batch_size=BATCH_SIZE,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def make_base(folder: Path, rows: list[dict[str, torch.Tensor]], vocabulary: int, updates: int) -> Path:
    """Train a small Llama and save it in bfloat16, as models are published."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, pad_token_id=0, **SIZES))
    train(model, rows, folder, updates, learning_rate=2e-3, bf16=True)
    model.to(torch.bfloat16).save_pretrained(folder / "base")
    return folder / "base"


def quantised(base: Path, compute_dtype: torch.dtype) -> Any:
    """Load the small Llama in 4 bits, the rest in bfloat16."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.bfloat16)


def run(
    base: Path, rows: list[dict[str, torch.Tensor]], prepare: Preparation, steps: int, **how: Any
) -> dict[str, Any]:
    """Train adapters after a preparation; return the loss of each step and that on unseen text afterwards."""
    seed, bf16 = how.get("seed", 0), how.get("bf16", True)
    model = quantised(base, torch.bfloat16 if bf16 else torch.float32)
    torch.manual_seed(seed)
    model = prepare(model)
    losses = train(model, rows[HELD_OUT:], base.parent, steps, learning_rate=1e-3, bf16=bf16, seed=seed)
    model.eval()
    with torch.no_grad():
        batches = [
            torch.stack([row["input_ids"] for row in rows[start : start + BATCH_SIZE]])
            for start in range(0, HELD_OUT, BATCH_SIZE)
        ]
        unseen = statistics.mean(model(input_ids=batch, labels=batch).loss.item() for batch in batches)
    return {"losses": losses, "unseen": unseen}


def training_figures(texts: list[str], steps: int, updates: int = UPDATES_OF_BASE) -> dict[str, Any]:
    """Train after every preparation, in float32 as the reference, and with another seed."""
    vocabulary, rows = token_blocks(texts)
    half = len(rows) // 2
    with tempfile.TemporaryDirectory() as folder:
        base = make_base(Path(folder), rows[half:], vocabulary, updates)
        found = {"float32 throughout": run(base, rows[:half], of_peft, steps, bf16=False)}
        for name, prepare in PREPARATIONS.items():
            found[name] = run(base, rows[:half], prepare, steps)
        found["prepare_quantized, another seed"] = run(base, rows[:half], ours, steps, seed=1)
    return found


def memory_figures() -> dict[str, int]:
    """Estimate the memory of Llama-3.1-8B after each preparation."""
    from hf_memopt import estimate

    return {
        name: estimate(**ESTIMATED, prepare=(prepare,)).total_bytes  # type: ignore[arg-type]
        for name, prepare in PREPARATIONS.items()
    }


def difference(losses: list[float], reference: list[float]) -> float:
    """Return the mean absolute difference of two loss curves."""
    return statistics.mean(abs(one - other) for one, other in zip(losses, reference, strict=True))


def table(figures: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    runs, memory = figures["runs"], figures["memory_bytes"]
    reference = runs["float32 throughout"]["losses"]
    last = len(reference) // 4
    rows = []
    for name, found in runs.items():
        losses = found["losses"]
        apart = "" if "seed" in name or losses is reference else f"{difference(losses, reference):.5f}"
        size = f"{memory[name] / 2**30:.2f} GiB" if name in memory else ""
        means = (losses[0], statistics.mean(losses[-last:]), found["unseen"])
        rows.append((name, *(f"{mean:.4f}" for mean in means), apart, size))
    head = "| preparation | first loss | last quarter | unseen text | mean difference per step | Llama-3.1-8B |"
    return markdown(head, rows)


def main() -> None:
    """Train, estimate, print the table, append the row."""
    from demo_task import read_docstrings, source_files

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80, metavar="N")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)  # peft 0.21, transformers 5.23
    texts = sorted(read_docstrings(source_files()))
    figures = {"runs": training_figures(texts, options.steps), "memory_bytes": memory_figures(), "estimated": ESTIMATED}
    show("quantized", figures, table(figures))


if __name__ == "__main__":
    main()
