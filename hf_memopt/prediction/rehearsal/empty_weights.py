"""Let ``from_pretrained`` load models that are not on this machine, with weights that nobody wrote.

It reads a folder as ``save_pretrained`` writes it, whose weights are holes in files: they take no room on the disk, and
all of transformers' own loading runs, quantisation too. The folder is made when a name is first asked for, from a
well-known configuration or from a ``config.json`` without weights beside it, on the disk or in the hub's cache.

Limitations: weights are zero, so a router sends all tokens to the same experts. Heads of classifiers are left out, as
in checkpoints to be fine-tuned. Processors of pictures and sound, and data sets, must be on the disk.
"""

from __future__ import annotations

import functools
import json
import os
import re
import struct
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerFast, modeling_utils
from transformers.utils import hub

from hf_memopt.prediction.memory.models import known_models, known_name, load_model
from hf_memopt.training.binding.model import HEADS, task_of_class

WEIGHTS = re.compile(r"\.(safetensors|bin|gguf|h5|msgpack)\b")
TOKENIZER = re.compile(r"\b(tokenizer|vocab|tekken)|\.(model|tiktoken)\b")
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}
SHARD_BYTES = 5 * 10**9  # of a file, as on the hub; Linux maps no file that is larger than its memory
WITHOUT_PADDING = ("llama", "mistral", "mixtral", "gpt2", "gpt_neo", "gpt_neox", "gpt_bigcode", "phi")
"""Model types whose tokenizers have no token to pad with, so that scripts choose one."""
CHAT = (
    "{% for m in messages %}{{ m['role'] + ':\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + "
    "eos_token }}{% endgeneration %}{% else %}{{ m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
PUBLISHED = {  # of weights on the hub by model type, read off their config.json, pickles and sizes; others: bfloat16
    "float16": {"deberta-v2", "gpt_bigcode", "gpt_neox", "opt", "phi"},
    "float32": {
        *("albert", "bert", "clip", "dinov2", "distilbert", "electra", "gemma2", "gpt2", "gpt_neo", "mamba"),
        *("modernbert", "mpnet", "olmo2", "roberta", "segformer", "t5", "vit", "wav2vec2", "whisper", "xlm-roberta"),
    },
}


def install(folder: Path) -> list[str]:
    """Let this process load models without weights; return a list of notes that grows as they are asked for.

    Names whose weights are on the disk or in the hub's cache are read as always.

    Args:
        folder: for what is read instead; its owner removes it at the end.
    """
    notes: list[str] = []
    made: dict[str, Path] = {}
    # both private, seen in transformers 5.23: files of names, and weights of folders
    files, weights = hub.cached_files, modeling_utils._get_resolved_checkpoint_files

    def instead_of(name: Any) -> Any:
        source = None if name is None else _source(str(name))
        if source is None:
            return name
        if str(name) not in made:
            made[str(name)] = folder / str(len(made))
            notes.append(f"{name}: {_make(made[str(name)], source, str(name))}")
        return made[str(name)]

    def cached_files(path_or_repo_id: Any, *args: Any, **kwargs: Any) -> Any:
        return files(instead_of(path_or_repo_id), *args, **kwargs)

    def checkpoint_files(pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        return weights(instead_of(pretrained_model_name_or_path), *args, **kwargs)

    hub.cached_files = cached_files
    modeling_utils._get_resolved_checkpoint_files = checkpoint_files
    return notes


def _source(name: str) -> Path | str | None:
    """Return the folder of a ``config.json`` without weights, or a well-known name; None for what is read as always."""
    path, cached = Path(name), None
    if not path.exists() and name.count("/") < 2:
        cached = try_to_load_from_cache(name, "config.json")
    folder = Path(cached).parent if isinstance(cached, str) else path
    if (folder / "config.json").is_file():
        return None if WEIGHTS.search(_names(folder)) else folder
    return None if path.exists() else known_name(name)


def published_dtype(text: str) -> str:
    """Return the dtype of a well-known model's weights on the hub; a float32 model is tuned and published in bfloat16.

    Examples:
        >>> published_dtype("opt-125m"), published_dtype("gemma-2-2b"), published_dtype("google/gemma-2-2b-it")
        ('float16', 'float32', 'bfloat16')
    """
    facts = known_models()[known_name(text) or text]
    of_type = (dtype for dtype, types in PUBLISHED.items() if facts["model_type"] in types)
    dtype: str = facts.get("dtype") or next(of_type, "bfloat16")
    return "bfloat16" if dtype == "float32" and {"instruct", "it", "chat"} & {*text.lower().split("-")} else dtype


def _names(folder: Path) -> str:
    return " ".join(path.name for path in folder.iterdir())


def _make(folder: Path, source: Path | str, name: str) -> str:
    """Write the folder that is read instead, and return what to say of it."""
    folder.mkdir(parents=True)
    if isinstance(source, Path):
        for path in source.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        dtype = getattr(AutoConfig.from_pretrained(source), "dtype", None) or "float32"
    else:
        dtype = published_dtype(name)
    dtype = str(dtype).removeprefix("torch.")
    model: Any = load_model(str(source), weights_dtype=dtype, keep_cache=True).model
    if isinstance(source, str):
        model.config.architectures, model.config.dtype = [type(model).__name__], dtype
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    _write_weights(folder, model)
    note, text_config = f"empty weights, in {dtype} where no dtype is given", model.config.get_text_config()
    if TOKENIZER.search(_names(folder)) or not hasattr(text_config, "vocab_size"):
        return note
    _tokenizer(text_config).save_pretrained(folder)
    return f"{note}; a tokenizer stands in, and counts tokens as of English text"


def _write_weights(folder: Path, model: Any) -> None:
    """Write safetensors files, each a header and a hole: a tied weight once, no head of a classifier."""
    from transformers.core_model_loading import revert_weight_conversion  # private, seen in transformers 5.23

    held = model.state_dict(keep_vars=True)
    first_names = {id(weight): name for name, weight in reversed(held.items())}.values()
    is_classifier = HEADS[task_of_class()[type(model).__name__]].new
    prefix = f"{model.base_model_prefix}." if is_classifier else ""
    kept: dict[str, Tensor] = {name: held[name].detach() for name in first_names if name.startswith(prefix)}
    places, end = {}, 0
    headers: dict[str, dict[str, Any]] = {}
    for name, weight in revert_weight_conversion(model, kept).items():
        if not headers or end + weight.nbytes > SHARD_BYTES:
            file, end = f"model-{len(headers) + 1:05d}.safetensors", 0
            headers[file] = {"__metadata__": {"format": "pt"}}
        offsets = [end, end := end + weight.nbytes]
        headers[file][name] = {"dtype": DTYPES[weight.dtype], "shape": list(weight.shape), "data_offsets": offsets}
        places[name] = file
    for file, header in headers.items():
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            if "lm_head.weight" in header:  # of T5 that is tied if it equals the embeddings
                opened.seek(header["lm_head.weight"]["data_offsets"][0], os.SEEK_CUR)
                opened.write(b"\1")
            opened.truncate(8 + len(text) + max(entry.get("data_offsets", (0, 0))[1] for entry in header.values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@functools.cache
def _byte_pairs() -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens and merges, learned from Python's own documentation."""
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(topics.values(), trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    return sorted(learned["vocab"], key=learned["vocab"].get), [(left, right) for left, right in learned["merges"]]


def _tokenizer(config: Any) -> Any:
    """Return a tokenizer with as many tokens as a model's vocabulary, and the special ones of its configuration."""
    size, kind, is_decoder = config.vocab_size, config.model_type, not config.is_encoder_decoder
    given = {name: getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    is_encoder = is_decoder and kind in HEADS["masked-lm"].types
    last = {"unk": 1, **({"cls": 2, "sep": 3, "mask": 4} if is_encoder else {"eos": 5})}
    last |= {} if kind in WITHOUT_PADDING else {"pad": 6}
    ids = {name: size - place for name, place in last.items()}
    ids |= {
        name: number[0] if isinstance(number, list) else number for name, number in given.items() if number is not None
    }
    words = {name: f"<|{number}|>" for name, number in ids.items()}
    learned, merges = _byte_pairs()
    free = [number for number in range(size) if number not in ids.values()]
    vocabulary = {words[name]: number for name, number in ids.items()} | dict(zip(learned, free, strict=False))
    vocabulary |= {f"<|{number}|>": number for number in free[len(learned) :]}
    tokenizer: Any = Tokenizer(models.BPE(vocabulary, [pair for pair in merges if "".join(pair) in vocabulary]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    around = ("cls", "sep") if is_encoder else ("bos", "") if is_decoder else ("", "eos")
    before, after = ([words[name]] if name in words else [] for name in around)
    special = [(word, vocabulary[word]) for word in (*before, *after)]
    single, pair = [*before, "$A", *after], [*before, "$A", *after, "$B", *after]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    length = getattr(config, "max_position_embeddings", None) or 512
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        model_max_length=length - length % 512 or length,  # RoBERTa's 514 positions are 512 tokens
        chat_template=None if is_encoder else CHAT,
        **{f"{name}_token": word for name, word in words.items()},
    )
