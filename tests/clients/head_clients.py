"""Trainings of the heads and architectures that people fine-tune: tokens, answers, choices, routers, state spaces."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
)

import tiny
from client import Arrange, Client, arguments, labelled, texts


def encoded(**columns: Any) -> Dataset:
    """Return 16 tokenised texts with these columns in place of labels; a function gets the tokens of each text."""
    rows = tiny.tokenizer()(texts(16))
    found = {name: [of(ids) for ids in rows["input_ids"]] if callable(of) else of for name, of in columns.items()}
    return Dataset.from_dict({**rows, **found})


def trained(
    folder: Path, arrange: Arrange, *, make: Any, data: Any = labelled, collate: Any = DataCollatorWithPadding
) -> Trainer:
    """A model made by ``make`` on data made by ``data``."""
    torch.manual_seed(0)
    return Trainer(
        model=make(),
        args=arguments(folder),
        train_dataset=arrange(data()),
        eval_dataset=data().select(range(8)),
        data_collator=collate(tiny.tokenizer()),
    )


def of_bert(kind: str, **settings: Any) -> Any:
    """Return what makes a tiny BERT of this head."""
    return lambda: getattr(transformers, f"BertFor{kind}")(tiny.bert_config(**settings))


def tagged() -> Dataset:
    """A class for each token; the second half of each text is ignored."""
    return encoded(labels=lambda ids: [i % 3 if i <= len(ids) // 2 else -100 for i in range(len(ids))])


def answered() -> Dataset:
    """Where in each text its answer begins and ends."""
    return encoded(start_positions=lambda ids: len(ids) // 3, end_positions=lambda ids: len(ids) // 2)


def chosen() -> Dataset:
    """Two endings for each text."""
    tokenizer, endings = tiny.tokenizer(), [texts(16, seed=1), texts(16, seed=2)]
    pairs = [tokenizer([text, text], list(both)) for text, *both in zip(texts(16), *endings, strict=True)]
    names = ("input_ids", "attention_mask")
    return Dataset.from_dict({**{name: [pair[name] for pair in pairs] for name in names}, "labels": [0, 1] * 8})


def two_endings(dataset: Any) -> list[int]:
    """Return the length of the longer ending of each row."""
    return [max(map(len, both)) for both in dataset["input_ids"]]


def bart(folder: Path, arrange: Arrange) -> Trainer:
    """BART with generation in evaluation and smoothed labels."""
    rows = dict(tiny.tokenizer()(texts(16), text_target=texts(16, seed=1, longest=10)))
    config = transformers.BartConfig(
        vocab_size=100,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=3,
        forced_eos_token_id=3,
    )
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config)
    return transformers.Seq2SeqTrainer(
        model=model,
        args=arguments(
            folder,
            transformers.Seq2SeqTrainingArguments,
            predict_with_generate=True,
            generation_max_length=8,
            label_smoothing_factor=0.1,
        ),
        train_dataset=arrange(Dataset.from_dict(rows)),
        eval_dataset=Dataset.from_dict(rows).select(range(8)),
        data_collator=DataCollatorForSeq2Seq(tiny.tokenizer(), model),
        processing_class=tiny.tokenizer(),
        compute_metrics=lambda found: {"tokens": int(found.predictions.sum())},
    )


SMALL = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def deberta() -> Any:
    """DeBERTa, whose attention sees distances."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pooler_dropout": 0.0}
    config = transformers.DebertaV2Config(
        **{**SMALL, **still}, relative_attention=True, pos_att_type=["p2c", "c2p"], pooler_hidden_size=16, num_labels=3
    )
    return transformers.DebertaV2ForSequenceClassification(config)


def modernbert() -> Any:
    """ModernBERT, which attends to a window in some of its layers."""
    config = transformers.ModernBertConfig(
        **{**SMALL, "num_hidden_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
        global_attn_every_n_layers=2,
        local_attention=8,
        num_labels=3,
    )
    return transformers.ModernBertForSequenceClassification(config)


def mixtral(**settings: Any) -> Any:
    """A mixture of experts."""
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **settings
    )
    return transformers.MixtralForCausalLM(config)


def mamba() -> Any:
    """A state space in place of attention."""
    config = transformers.MambaConfig(
        vocab_size=100, hidden_size=16, state_size=4, num_hidden_layers=1, time_step_rank=2, pad_token_id=0
    )
    return transformers.MambaForCausalLM(config)


def gpt2() -> Any:
    """Positions that are learnt."""
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=100, n_positions=64, n_embd=16, n_layer=1, n_head=2, **still)
    )


def qwen() -> Any:
    """Qwen3, with a tied head."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    )


def gemma() -> Any:
    """Gemma 3, which attends to a window in some of its layers."""
    config = transformers.Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 2},
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    return transformers.Gemma3ForCausalLM(config)


causal = functools.partial(
    functools.partial,
    trained,
    data=lambda: encoded(),
    collate=lambda tokenizer: DataCollatorForLanguageModeling(tokenizer, mlm=False),
)

CLIENTS = {
    "token classification, BERT": Client(
        functools.partial(
            trained, make=of_bert("TokenClassification"), data=tagged, collate=DataCollatorForTokenClassification
        )
    ),
    "question answering, BERT": Client(
        functools.partial(trained, make=of_bert("QuestionAnswering", num_labels=2), data=answered)
    ),
    "multiple choice, BERT": Client(
        functools.partial(trained, make=of_bert("MultipleChoice"), data=chosen, collate=DataCollatorForMultipleChoice),
        lengths=two_endings,
    ),
    "regression, BERT": Client(
        functools.partial(
            trained,
            make=of_bert("SequenceClassification", num_labels=1),
            data=lambda: encoded(labels=lambda ids: len(ids) / 20),
        )
    ),
    "several labels of a text, BERT": Client(
        functools.partial(
            trained,
            make=of_bert("SequenceClassification", problem_type="multi_label_classification"),
            data=lambda: encoded(labels=lambda ids: [float(len(ids) % k == 0) for k in (2, 3, 4)]),
        )
    ),
    "classification, DeBERTa": Client(functools.partial(trained, make=deberta)),
    "classification, ModernBERT": Client(functools.partial(trained, make=modernbert)),
    "Seq2SeqTrainer, BART with smoothed labels": Client(bart),
    "causal language model, GPT-2": Client(causal(make=gpt2)),
    "causal language model, Qwen3": Client(causal(make=qwen)),
    "causal language model, Gemma 3": Client(causal(make=gemma)),
    "causal language model, Mamba": Client(causal(make=mamba)),
    "mixture of experts, Mixtral": Client(causal(make=mixtral)),
    "mixture of experts, loss of its router": Client(
        causal(make=functools.partial(mixtral, output_router_logits=True, router_aux_loss_coef=0.1)),
    ),
}
