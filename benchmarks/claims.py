"""The table of ``docs/benchmarks.md``: what is claimed, the command that shows it, its figure, the commit it ran on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import judge
import public_scripts
import rehearsals
from results_file import last_row, markdown

from hf_memopt.units import format_bytes, percent

CLIENTS = Path(__file__).resolve().parent.parent / "tests" / "clients"
Figures = Mapping[str, Any]


class Claim(NamedTuple):
    """A row of the table; ``figure`` reads the figures of the last row of ``case``."""

    what: str
    command: str
    case: str
    figure: Callable[[Figures], str]


def _judge(figures: Figures) -> str:
    rows = figures["rows"]
    return f"{sum(map(judge.is_inside, rows))} of {len(rows)} set-ups"


def _published(figures: Figures) -> str:
    found = figures["summaries"]["all, matched"]
    return f"median {percent(found['median'], 1)}, worst {percent(found['worst'], 1)} of {found['cases']} figures"


def _step_time(figures: Figures) -> str:
    groups = [group for name, group in figures["summaries"].items() if name.endswith("not fitted")]
    worst, rows = max(group["worst"] for group in groups), sum(group["rows"] for group in groups)
    return f"worst {percent(worst)} of {rows} steps that no rate was fitted to"


def _estimation(figures: Figures) -> str:
    found = figures["Llama-3.1-8B 2 x 512"]
    return f"Llama-3.1-8B: {found['seconds']:.2f} s, {format_bytes(found['host_bytes'])} of host memory"


def _padding(figures: Figures) -> str:
    arms = figures["figures"]["review"]["arms"]
    ours, random = (arms[arm]["padding_efficiency"] for arm in ("hf_memopt max_tokens", "random, safe"))
    return f"{percent(ours)} real tokens; random order {percent(random)}"


def _collation(figures: Figures) -> str:
    ratios = [found["ratio"] for found in figures["figures"].values()]
    return f"{min(ratios):.0f} to {max(ratios):.0f} times as fast as the plain collator"


def _end_to_end(figures: Figures) -> str:
    arms = figures["figures"]["arms"]
    seconds = {name: arm["seconds"] for name, arm in arms.items()}
    return f"{seconds['random'] / seconds['batch_size']:.1f} times as fast as random order"


def _accuracy(figures: Figures) -> str:
    low, high = figures["interval"]
    return f"{figures['mean_difference']:+.3f} against random batches, 95 % interval {low:+.3f} to {high:+.3f}"


def _checkpointing(figures: Figures) -> str:
    found = figures["policies"]["BERT-large, 32 x 128"]
    saved = 1 - found["selective"]["saved_bytes"] / found["none"]["saved_bytes"]
    more = found["selective"]["flops"] / found["none"]["flops"] - 1
    return f"selective, BERT-large: {percent(saved)} less saved, {percent(more, 1)} more operations"


def _fused(figures: Figures) -> str:
    ratios = [step["ratio"] for step in figures["steps"].values()]
    least, most = percent(1 - max(ratios)), percent(1 - min(ratios))
    return f"{least if least == most else f'{least} to {most}'} less CPU time"


def _long_rows(figures: Figures) -> str:
    counted = figures["counted"]
    kept = counted["layers checkpointed, in tiles"]["peak_bytes"] / counted["layers checkpointed"]["peak_bytes"]
    return f"{percent(1 - kept)} less than checkpointed layers, as many operations"


def _longest(figures: Figures) -> str:
    longest = max(figures["rows"], key=lambda row: row["tokens"])
    model, *_, gpu = longest["row"]
    return f"{model} on {gpu}: {longest['tokens']:,} tokens; without tiles {longest['plain']:,}"


def _microbatch(figures: Figures) -> str:
    overhead, mixed = figures["overhead"], figures["mixed_lengths"]
    plain, *_, ours = (way["seconds_per_step"] for way in mixed.values())
    return f"{1e6 * overhead['callback_seconds']:.0f} µs a step; {plain / ours:.1f} times as fast as accumulation"


def _resume(figures: Figures) -> str:
    found = figures["AdamW of torch"]
    return (
        f"{format_bytes(found['lean']['host_bytes'])} of host memory for {format_bytes(found['stock']['host_bytes'])}"
    )


def _manifest(figures: Figures) -> str:
    seconds = figures["cases"]["8 layers, one file"]["seconds"]
    return f"{percent(seconds['manifest'] / seconds['flushed'])} of the time of saving with a flush"


def _large_models(figures: Figures) -> str:
    of_pairs = [[found["to_spare_bytes"] for found in pair.values()] for pair in figures["rows"].values()]
    least = min(last - first for first, *_, last in of_pairs)
    return f"at least {format_bytes(least)} less, of {len(of_pairs)} models on 4 to 24 GB"


def _larger(figures: Figures) -> str:
    model, gpu, *_ = figures["rows"][0]["row"]
    return f"{model} in full on {gpu}: {figures['rows'][0]['tokens_per_second']:.0f} tokens/s"


def _resident(figures: Figures) -> str:
    shares = [row["tokens_per_second"][2] / row["tokens_per_second"][0] for row in figures["rows"]]
    return f"at most {max(shares):.2f} times the time of a GPU that holds it"


def _experts(figures: Figures) -> str:
    model = figures["models"][0]
    plan = model["plans"][0]
    sizes = f"{format_bytes(plan['total_bytes'])} for {format_bytes(model['stock_bytes'])}"
    return f"{model['name']} on {plan['gpu']}: {sizes}"


def _sixteen_bits(figures: Figures) -> str:
    loss = figures["stochastic"]["loss_difference"][0]
    return f"stochastic rounding: {loss:+.5f} of loss, in 3 seeds"


def _quantized(figures: Figures) -> str:
    ours, peft = figures["memory_bytes"]["prepare_quantized"], max(figures["memory_bytes"].values())
    return f"{format_bytes(ours)} for {format_bytes(peft)} of PEFT's"


def _packed(figures: Figures) -> str:
    found = figures["attention"]
    ratio = found["4096, stock"]["cpu_seconds"] / found["4096, within texts"]["cpu_seconds"]
    return f"attention within texts {ratio:.1f} times as fast at 4,096 tokens"


def _trl(figures: Figures) -> str:
    found = figures["loss_of_texts_alone"]
    return f"OPT's loss of new texts {found['opt, packed'][0]:.2f}, with TRL's packing {found['opt, TRL'][0]:.2f}"


def _padding_free(figures: Figures) -> str:
    used = [found["arms"]["max_tokens, no padding"]["budget_used"] for found in figures.values()]
    return f"{percent(min(used))} to {percent(max(used))} of the budget are real tokens"


def _page(figures: Figures) -> str:
    median, within = percent(figures["allocated_median"], 2), percent(figures["allocated_within_1"])
    return f"between simulated lengths: median {median}, within 1 % at {within} of the points"


CLAIMS = (
    Claim("the estimate equals torch's own CUDA allocator", "python benchmarks/judge.py", "judge", _judge),
    Claim("predicted memory against other people's runs", "make bench-published", "published", _published),
    Claim("predicted seconds against other people's runs", "make bench-step-time", "step_time", _step_time),
    Claim("an estimate is quick", "python benchmarks/estimation.py", "estimation", _estimation),
    Claim("the page Does it fit? between its points", "python benchmarks/fit_data.py --check 300", "fit_data", _page),
    Claim("micro-batches", "python benchmarks/microbatch.py", "microbatch", _microbatch),
    Claim(
        "the memory report costs little",
        "python benchmarks/memory_report.py",
        "memory_report",
        lambda found: f"{percent(found['overhead_with_log_percent'] / 100, 2)} of a step",
    ),
    Claim("samplers", "make bench-batching", "batching_lengths", _padding),
    Claim("collators", "make bench-batching", "batching_collation", _collation),
    Claim("the same task end to end", "make bench-batching", "batching_end_to_end", _end_to_end),
    Claim("batches without padding", "python benchmarks/padding_free.py", "padding_free", _padding_free),
    Claim("packed rows", "python benchmarks/packed_rows.py", "packed_rows", _packed),
    Claim("packed rows beside TRL's packing", "python benchmarks/trl_packing.py", "trl_packing", _trl),
    Claim("accuracy over seeds", "python benchmarks/accuracy.py", "accuracy", _accuracy),
    Claim("checkpointing policies", "python benchmarks/checkpointing.py", "checkpointing", _checkpointing),
    Claim("fused cross-entropy", "python benchmarks/fused_cross_entropy.py", "fused cross entropy", _fused),
    Claim("tiles of positions", "python benchmarks/long_rows.py", "long_rows", _long_rows),
    Claim("the longest row per GPU", "python benchmarks/longest_rows.py", "longest_rows", _longest),
    Claim("full fine-tuning on small GPUs", "python benchmarks/large_models.py", "large_models", _large_models),
    Claim("models larger than the GPU", "python benchmarks/larger_than_gpu.py", "larger_than_gpu", _larger),
    Claim("layers stay where they fit", "python benchmarks/resident_layers.py", "resident_layers", _resident),
    Claim("mixtures of experts in 4 bits", "python benchmarks/experts.py", "experts", _experts),
    Claim("16-bit weights", "python benchmarks/sixteen_bit_weights.py", "16-bit weights, causal-lm", _sixteen_bits),
    Claim("QLoRA's preparations", "python benchmarks/quantized.py", "quantized", _quantized),
    Claim("memory of a resume", "python benchmarks/resume.py", "resume", _resume),
    Claim("a checkpoint's manifest", "python benchmarks/checkpoint_manifest.py", "checkpoint manifest", _manifest),
)


def table() -> str:
    """Return a line for each claim. Where other files have the results, their day stands for the commit."""
    lines = []
    for claim in CLAIMS:
        row = last_row(claim.case)
        lines.append((claim.what, f"`{claim.command}`", claim.figure(row["figures"]), row["commit"]))
    return markdown("| claim | command | figure | commit |", [*lines, *_of_files()])


def _of_files() -> Iterator[tuple[str, str, str, str]]:
    """Yield the claims whose results are in files of their own."""
    programs, scripts = rehearsals.stored(), {name: last_row(name) for name in public_scripts.SCRIPTS}
    held = f"{sum(rehearsals.holds(row['figures']) for row in programs.values())} of {len(programs)} exact within 1 %"
    yield "programs, rehearsed", "`python benchmarks/rehearsals.py`", held, _commit(programs)
    held = f"{sum(public_scripts.holds(row['figures']) for row in scripts.values())} of {len(scripts)} exact within 1 %"
    command = "`python benchmarks/public_scripts.py TRANSFORMERS_SRC NANOGPT_SRC`"
    yield "public scripts, rehearsed", command, held, _commit(scripts)
    about, *rows = map(json.loads, (CLIENTS / "pattern_results.jsonl").read_text("utf-8").splitlines())
    patterns, wrong = {row["client"] for row in rows}, {row["client"] for row in rows if not row["is_right"]}
    figure = f"{len(wrong)} of {len(patterns)} patterns differ from the plain Trainer"
    yield "other people's trainings", "`make test-clients`", figure, about["date"]
    yield "predicted against measured memory on a GPU", "`make bench-gpu`", "not measured yet", "-"


def _commit(rows: Mapping[str, Any]) -> str:
    return max((row["date"], row["commit"] or "-") for row in rows.values())[1]
