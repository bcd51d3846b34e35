"""The groups of commands in ``hf-memopt --help``, and the examples that end the help of each command."""

from __future__ import annotations

__all__ = ["BEFORE", "EXAMPLES", "MACHINE", "TRYING_OUT"]

BEFORE, MACHINE, TRYING_OUT = "Before the run", "On the machine that trains", "To try out and compare"


def _examples(*commands: str) -> str:
    """Return an epilog; its first line keeps click from filling the others."""
    return "\n".join(["\b", "Examples:", *(f"  hf-memopt {command}" for command in commands)])


EXAMPLES = {
    "": _examples(
        'plan Qwen/Qwen2.5-1.5B --gpu "RTX 3060 12GB"',
        "lengths train.jsonl",
        "doctor",
    ),
    "demo": _examples("demo", "demo -n 200 --json figures.json"),
    "presets": _examples("presets", "presets 8gb-gpu", "presets 8gb-gpu --model gpt2 -s 512"),
    "lengths": _examples(
        "lengths train.jsonl",
        "lengths reviews.csv --column text --tokenizer bert-base-uncased",
        "lengths data/ -b 16 --max-length 512 --plot lengths.png",
    ),
    "estimate": _examples(
        'estimate gpt2 -g "RTX 3060 12GB"',
        "estimate Qwen/Qwen2.5-1.5B -b 4 -g T4 --lora 16 --load-in nf4",
        "estimate bert-large-uncased --data train.jsonl --preset 8gb-gpu",
        'estimate Llama-3.2-1B -g "RTX 4060" --compare --plot ladder.png',
    ),
    "plan": _examples(
        'plan bert-large-uncased -g "RTX 3060 12GB" -s 128',
        "plan Qwen/Qwen2.5-1.5B -g T4 -d train.jsonl --write run",
        'plan Llama-3.2-1B -g "RTX 4060" --method full --allow bf16_weights',
        "plan gpt2 -g 8GB --goal longest --report plan.html",
    ),
    "report": _examples(
        'plan gpt2 -g "RTX 4060" --report plan.html --json > plan.json',
        "report plan.json",
        "report out/",
        "report old/ new/ -o grew.html",
    ),
    "measure": _examples(
        "measure train.py", "measure train.py -n 20 -o run.json", "measure train.py -- --learning_rate 1e-4"
    ),
    "doctor": _examples("doctor", "doctor --json"),
}
