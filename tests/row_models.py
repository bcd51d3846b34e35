"""Tiny models of many architectures, and losses that see the whole batch: what rows in parts are held against.

Run as a program it is one of two processes, each of which trains with the real Trainer; ``test_rows_in_parts.py`` reads
how far they are from whole batches.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as T
from torch import nn
from torch.nn import functional

import tiny
from hf_memopt.training.binding import attach
from hf_memopt.training.techniques.microbatching import MicrobatchCallback

ROWS, COLUMNS, WORDS = 7, 10, 99
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
PLACES = {"max_position_embeddings": 64}
MIDDLE = {**SIZES, **PLACES, "intermediate_size": 48}
GROUPED = {**MIDDLE, "num_key_value_heads": 2}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {**MIDDLE, **DRY, "num_labels": 3}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16}
IMAGE |= {"patch_size": 8, **DRY, "num_labels": 3}
EXPERTS = {"experts_implementation": "eager"}  # float64 has no grouped matrix product
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {"vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48}
SEQ2SEQ |= {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
SEQ2SEQ |= {"attention_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
SEQ2SEQ |= {**PLACES, **SPECIAL, "decoder_start_token_id": 1, "forced_eos_token_id": None}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0}
GPT = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0}
GPT |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0}
SOUND = {**MIDDLE, "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0}
SOUND |= {"layerdrop": 0.0, "final_dropout": 0.0, "mask_time_prob": 0.0, "conv_dim": (16, 16), "conv_stride": (5, 4)}
SOUND |= {
    "conv_kernel": (10, 5),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "classifier_proj_size": 16,
}
SOUND |= {"num_conv_pos_embedding_groups": 2, "num_labels": 3, "feat_extract_norm": "layer"}
TEXT_TOWER = {**SIZES, "intermediate_size": 48, "max_position_embeddings": 16, "attention_dropout": 0.0}
IMAGE_TOWER = {name: IMAGE[name] for name in list(IMAGE)[:6]}


class Batch(NamedTuple):
    """Inputs of a model, labels of its own loss, and a class for each row."""

    inputs: dict[str, Any]
    labels: dict[str, Any]
    classes: torch.Tensor


class Architecture(NamedTuple):
    """A model, its batches, and the largest error of a gradient, in parts of the largest one.

    ``tolerance``: float64 adds the rows in another order; models with islands of float32 need more.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    tolerance: float = 1e-10


def _model(kind: str, config: str | None = None, **settings: Any) -> Callable[[], nn.Module]:
    name = config or kind.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model") + "Config"
    return lambda: getattr(T, kind)(getattr(T, name)(**settings))


# ---- Batches --------------------------------------------------------------------------------------------------------


def _ids(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, WORDS, (rows, COLUMNS), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 7:] = 0
    return ids.masked_fill(mask == 0, 0), mask


def _classes(rows: int) -> torch.Tensor:
    return torch.tensor([0, 1, 0, 2, 1, 1, 0, 2])[torch.arange(rows) % 8]


def classified(rows: int) -> Batch:
    """Texts with a class each."""
    ids, mask = _ids(rows)
    return Batch({"input_ids": ids, "attention_mask": mask}, {"labels": _classes(rows)}, _classes(rows))


def causal(rows: int) -> Batch:
    """Texts whose words are predicted."""
    ids, mask = _ids(rows)
    labels = ids.masked_fill(mask == 0, -100)
    return Batch({"input_ids": ids, "attention_mask": mask, "use_cache": False}, {"labels": labels}, _classes(rows))


def stateful(rows: int) -> Batch:
    """The same for models that take no mask."""
    inputs, labels, classes = causal(rows)
    return Batch({name: inputs[name] for name in ("input_ids", "use_cache")}, labels, classes)


def masked(rows: int) -> Batch:
    """Texts of which some words are predicted."""
    inputs, labels, classes = causal(rows)
    return Batch({name: inputs[name] for name in ("input_ids", "attention_mask")}, labels, classes)


def seq2seq(rows: int) -> Batch:
    """Texts with the words of their beginning in reverse."""
    ids, mask = _ids(rows)
    labels = ids[:, :5].flip(1)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    return Batch({**inputs, "decoder_input_ids": labels.roll(1, 1)}, {"labels": labels}, _classes(rows))


def _normal(rows: int, *shape: int) -> torch.Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def images(rows: int) -> Batch:
    """Images with a class each."""
    return Batch({"pixel_values": _normal(rows, 3, 16, 16)}, {"labels": _classes(rows)}, _classes(rows))


def sounds(rows: int) -> Batch:
    """Sounds with a class each."""
    return Batch({"input_values": _normal(rows, 400)}, {"labels": _classes(rows)}, _classes(rows))


def spoken(rows: int) -> Batch:
    """Spectra of sounds, and the words."""
    inputs = {"input_features": _normal(rows, 80, 48), "decoder_input_ids": _ids(rows)[0], "use_cache": False}
    return Batch(inputs, {"labels": _ids(rows)[0]}, _classes(rows))


def spectra(rows: int) -> Batch:
    """Spectra of sounds with a class each."""
    return Batch({"input_values": _normal(rows, 32, 16)}, {"labels": _classes(rows)}, _classes(rows))


def captioned(rows: int) -> Batch:
    """Images and texts that belong together."""
    ids, mask = _ids(rows)
    ids[:, -1] = 2  # CLIP reads a text at its end
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(mask), "pixel_values": _normal(rows, 3, 16, 16)}
    return Batch(inputs, {"return_loss": True}, _classes(rows))


def _with_image(tokens: int) -> torch.Tensor:
    ids = _ids(ROWS * 2)[0].clamp(min=5, max=90)
    ids[:, 1 : 1 + tokens] = 97
    return ids


def pictured(rows: int) -> Batch:
    """Texts with an image inside."""
    ids = _with_image(4)[:rows]
    inputs = {"input_ids": ids, "pixel_values": _normal(rows, 3, 16, 16), "use_cache": False}
    return Batch({**inputs, "attention_mask": torch.ones_like(ids)}, {"labels": ids}, _classes(rows))


def patched(rows: int) -> Batch:
    """The same with the patches of all images in one row."""
    ids = _with_image(1)[:rows]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    inputs |= {"pixel_values": _normal(rows * 4, 3 * 2 * 8 * 8), "image_grid_thw": torch.tensor([[1, 2, 2]] * rows)}
    return Batch({**inputs, "mm_token_type_ids": (ids == 97).long()}, {"labels": ids}, _classes(rows))


# ---- Architectures --------------------------------------------------------------------------------------------------


def _bart_decoder() -> nn.Module:
    return T.BartForCausalLM(T.BartConfig(**SEQ2SEQ))


def _llava() -> nn.Module:
    vision, text = T.CLIPVisionConfig(**IMAGE_TOWER), T.LlamaConfig(**GROUPED, **SPECIAL)
    config = T.LlavaConfig(vision_config=vision, text_config=text, image_token_index=97, image_token_id=97)
    config.vision_feature_layer = -1
    return T.LlavaForConditionalGeneration(config)


def _qwen2_vl() -> nn.Module:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8}
    text = {**GROUPED, **SPECIAL, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    special = {"image_token_id": 97, "video_token_id": 96, "vision_start_token_id": 95, "vision_end_token_id": 94}
    return T.Qwen2VLForConditionalGeneration(T.Qwen2VLConfig(text_config=text, vision_config=vision, **special))


def _towers(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(T, f"{kind}Model")(
        getattr(T, f"{kind}Config")(text_config=TEXT_TOWER, vision_config=IMAGE_TOWER, **settings)
    )


ISLANDS = 1e-7  # of float32 in a model of float64: rotary tables, states, routers


def _classifier(kind: str, **settings: Any) -> Architecture:
    return Architecture(_model(f"{kind}ForSequenceClassification", **{**ENCODER, **settings}), classified)


def _decoder(kind: str, **settings: Any) -> Architecture:
    return Architecture(_model(f"{kind}ForCausalLM", **{**GROUPED, **SPECIAL, **settings}), causal)


def _experts(kind: str, **settings: Any) -> Architecture:
    routed = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    return _decoder(kind, **{**routed, **EXPERTS, **settings})


MAMBA = {"state_size": 4, "time_step_rank": 4, "conv_kernel": 2}
DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}
XLNET = {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "dropout": 0.0}
XLNET |= {"summary_last_dropout": 0.0}
CONV = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}

ARCHITECTURES = {
    # encoders
    "bert": _classifier("Bert"),
    "bert-mlm": Architecture(_model("BertForMaskedLM", **ENCODER), masked),
    "roberta": _classifier("Roberta", pad_token_id=0),
    "distilbert": _classifier("DistilBert", vocab_size=WORDS, **DISTIL, seq_classif_dropout=0.0),
    "albert": _classifier("Albert", embedding_size=16, classifier_dropout_prob=0.0),
    "electra": _classifier("Electra", embedding_size=16),
    "deberta-v2": _classifier("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "mpnet": _classifier("MPNet", pad_token_id=0),
    "modernbert": _classifier("ModernBert", pad_token_id=0, attn_implementation="eager"),
    "fnet": _classifier("FNet", tpu_short_seq_length=COLUMNS),
    "xlnet": Architecture(_model("XLNetForSequenceClassification", **XLNET, num_labels=3), classified),
    # decoders
    "llama": _decoder("Llama"),
    "llama-tied": _decoder("Llama", tie_word_embeddings=True),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma2": _decoder("Gemma2", head_dim=8, final_logit_softcapping=20.0)._replace(tolerance=ISLANDS),
    "gemma3": Architecture(_model("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=8), causal, ISLANDS),
    "cohere": _decoder("Cohere")._replace(tolerance=ISLANDS),
    "olmo2": _decoder("Olmo2"),
    "phi": _decoder("Phi"),
    "gpt2": Architecture(_model("GPT2LMHeadModel", **GPT, **SPECIAL), causal),
    "gpt-neox": _decoder("GPTNeoX"),
    "bloom": _decoder("Bloom", n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    "falcon": _decoder("Falcon", alibi=True),
    "opt": _decoder("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "bart-decoder": Architecture(_bart_decoder, causal),
    # mixtures of experts
    "mixtral": _experts("Mixtral", num_local_experts=4),
    "qwen2-moe": _experts("Qwen2Moe", num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    "olmoe": _experts("Olmoe", num_experts=4),
    "granite-moe": _experts("GraniteMoe", num_local_experts=4),
    # states instead of attention
    "mamba": Architecture(_model("MambaForCausalLM", **SIZES, **SPECIAL, **MAMBA), stateful, ISLANDS),
    "falcon-mamba": Architecture(_model("FalconMambaForCausalLM", **SIZES, **SPECIAL, **MAMBA), stateful, ISLANDS),
    "mamba2": Architecture(
        _model(
            "Mamba2ForCausalLM", **SIZES, **SPECIAL, state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=4
        ),
        stateful,
        ISLANDS,
    ),
    "rwkv": Architecture(_model("RwkvForCausalLM", **SIZES, **SPECIAL, attention_hidden_size=32), stateful),
    "jamba": _experts(
        "Jamba", num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4
    ),
    "lfm2": _decoder("Lfm2", layer_types=["conv", "full_attention"]),
    # encoder-decoders
    "t5": Architecture(_model("T5ForConditionalGeneration", **T5), seq2seq),
    "bart": Architecture(_model("BartForConditionalGeneration", **SEQ2SEQ), seq2seq),
    "mbart": Architecture(_model("MBartForConditionalGeneration", **SEQ2SEQ), seq2seq),
    "pegasus": Architecture(_model("PegasusForConditionalGeneration", **SEQ2SEQ), seq2seq),
    "m2m100": Architecture(_model("M2M100ForConditionalGeneration", "M2M100Config", **SEQ2SEQ), seq2seq),
    "switch": Architecture(
        _model("SwitchTransformersForConditionalGeneration", **T5, **EXPERTS, num_experts=2, router_jitter_noise=0.0),
        seq2seq,
        ISLANDS,
    ),
    # images
    "vit": Architecture(_model("ViTForImageClassification", **IMAGE), images),
    "deit": Architecture(_model("DeiTForImageClassification", **IMAGE), images),
    "beit": Architecture(_model("BeitForImageClassification", **IMAGE, drop_path_rate=0.0), images),
    "dinov2": Architecture(_model("Dinov2ForImageClassification", **IMAGE), images),
    "swin": Architecture(_model("SwinForImageClassification", **SWIN, num_labels=3, drop_path_rate=0.0), images),
    "convnext": Architecture(_model("ConvNextForImageClassification", **CONV), images),
    # sounds
    "wav2vec2": Architecture(_model("Wav2Vec2ForSequenceClassification", **SOUND), sounds),
    "hubert": Architecture(_model("HubertForSequenceClassification", **SOUND), sounds),
    "whisper": Architecture(
        _model(
            "WhisperForConditionalGeneration", **{**SEQ2SEQ, "max_position_embeddings": 64}, max_source_positions=24
        ),
        spoken,
    ),
    "ast": Architecture(
        _model("ASTForAudioClassification", **{**IMAGE, "patch_size": 8}, max_length=32, num_mel_bins=16), spectra
    ),
    # texts and images
    "clip": Architecture(_towers("CLIP", projection_dim=16), captioned),
    "siglip": Architecture(_towers("Siglip"), captioned),
    "llava": Architecture(_llava, pictured),
    "qwen2-vl": Architecture(_qwen2_vl, patched),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """Return a model in float64 and training mode, its weights drawn from a seed."""
    torch.manual_seed(seed)
    return ARCHITECTURES[name].build().double().train()


# ---- Losses ---------------------------------------------------------------------------------------------------------


def features(outputs: Any) -> torch.Tensor:
    """Return one vector for each row, shape (rows, dim): logits or embeddings, their mean over a sequence."""
    name = next(name for name in ("logits", "text_embeds", "last_hidden_state") if outputs.get(name) is not None)
    found = outputs[name]
    if name == "text_embeds":
        found = found + outputs["image_embeds"]
    return found if found.dim() == 2 else found.flatten(1, -2).mean(1)


def _each(found: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(found, classes, reduction="none")


def supcon(found: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Supervised contrastive: rows of a class against all others."""
    found = functional.normalize(found, dim=1)
    own = torch.eye(len(found), dtype=torch.bool)
    chances = (found @ found.T / 0.1).masked_fill(own, -1e9).log_softmax(1)
    same = (classes[:, None] == classes) & ~own
    return -(chances * same).sum(1).div(same.sum(1).clamp(min=1)).mean()


def hard(found: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The three rows with the largest losses."""
    return _each(found, classes).topk(3).values.mean()


def weighted(found: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """A mean weighted by class."""
    of_classes = torch.arange(1.0, found.shape[1] + 1, dtype=found.dtype)
    return functional.cross_entropy(found, classes, weight=of_classes)


def entropy(found: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The entropy of what the batch predicts on the whole, as routers are balanced by."""
    chances = found.softmax(1).mean(0)
    return (chances * chances.log()).sum() + _each(found, classes).mean()


def ranking(found: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Each row against those of a lower class."""
    scores = found[:, 0]
    return functional.softplus(-(scores[:, None] - scores))[classes[:, None] > classes].mean()


OVER_ROWS = {"supcon": supcon, "hard": hard, "weighted": weighted, "ranking": ranking}


def _own(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch.inputs, **batch.labels).loss


def _step_own(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss = _own(model, batch)
    loss.backward()
    return loss


def _step_router(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a router where there is one, else one over the mean of the batch."""
    outputs = model(**batch.inputs)
    loss = entropy(features(outputs), batch.classes)
    if outputs.get("router_logits") is not None:
        loss = loss + model(**batch.inputs, **batch.labels).aux_loss
    loss.backward()
    return loss


def _step_attack(model: nn.Module, batch: Batch) -> torch.Tensor:
    """FGM: a second backward pass with one weight moved along its gradient, and moved back after it."""
    loss = entropy(features(model(**batch.inputs)), batch.classes)
    loss.backward()
    weight = next(p for p in model.parameters() if p.grad is not None)
    moved = 0.5 * weight.grad / weight.grad.norm()
    weight.data.add_(moved)
    attacked = entropy(features(model(**batch.inputs)), batch.classes)
    attacked.backward()
    weight.data.sub_(moved)
    return loss + attacked.detach()


def _step_twice(model: nn.Module, batch: Batch) -> torch.Tensor:
    """R-Drop: two forward passes; each row's neighbour stands in for the same row with other draws of dropout."""
    other = {name: _of_neighbour(value) for name, value in batch.inputs.items()}
    one, two = (features(model(**inputs)).log_softmax(1) for inputs in (batch.inputs, other))
    loss = functional.nll_loss(one, batch.classes)
    for first, second in ((one, two), (two, one)):
        loss = loss + functional.kl_div(first, second, reduction="batchmean", log_target=True)
    loss.backward()
    return loss


def _of_neighbour(value: Any) -> Any:
    return value.roll(len(value) // ROWS, 0) if torch.is_tensor(value) else value


def _step_over(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def step(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = loss_of(features(model(**batch.inputs)), batch.classes)
        loss.backward()
        return loss

    return step


STEPS: dict[str, Callable[[nn.Module, Batch], torch.Tensor]] = {
    "own": _step_own,
    **{name: _step_over(loss_of) for name, loss_of in OVER_ROWS.items()},
    "router": _step_router,
    "attack": _step_attack,
    "twice": _step_twice,
}


# ---- Training -------------------------------------------------------------------------------------------------------

RANK = int(os.environ.get("RANK", 0))
TRAINED = [("bert", "supcon"), ("llama-tied", "hard"), ("t5", "attack"), ("vit", "supcon")]


class OverRows(T.Trainer):
    """Trains with one of ``OVER_ROWS``; "attack": two backward passes in a step."""

    loss_name = "supcon"

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        classes = inputs["classes"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "classes"})
        loss = OVER_ROWS.get(self.loss_name, supcon)(features(outputs), classes)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.loss_name == "attack":
            weight = next(model.parameters())
            moved = 0.5 * weight.grad / weight.grad.norm()
            weight.data.add_(moved)
            super().training_step(model, inputs, num_items_in_batch)
            weight.data.sub_(moved)
        return loss


def train(name: str, loss: str, folder: Any, *callbacks: Any, **settings: Any) -> T.Trainer:
    """Return a trainer after two steps of three accumulation steps of 5 rows each."""
    inputs, _, classes = ARCHITECTURES[name].batch(72)
    columns = {key: value for key, value in {**inputs, "classes": classes}.items() if torch.is_tensor(value)}
    dataset = [{key: value[row] for key, value in columns.items()} for row in range(len(classes))]
    arguments = tiny.arguments(
        folder,
        per_device_train_batch_size=5,
        gradient_accumulation_steps=3,
        max_steps=2,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        **settings,
    )
    model = build(name)
    vars(model)["accepts_loss_kwargs"] = False  # stock then divides by the accumulation steps
    trainer = type(loss, (OverRows,), {"loss_name": loss})(model=model, args=arguments, train_dataset=dataset)
    attach(trainer, *callbacks)
    trainer.train()
    return trainer


def main(folder: str) -> None:
    """Write how far each run in parts is from the one of whole batches, and how many of its steps were cut."""
    gc.freeze()  # the Trainer collects garbage at the start of each run
    found = {}
    for name, loss in TRAINED:
        whole = train(name, loss, folder, **tiny.DDP)
        callback = MicrobatchCallback(max_examples=2)
        parts = train(name, loss, folder, callback, **tiny.DDP)
        found[f"{name}: {loss}"] = tiny.largest_difference(whole.model, parts.model), callback.tally.cut_steps
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
