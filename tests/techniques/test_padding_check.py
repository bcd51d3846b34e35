"""Padding is cut off micro-batches only where the loss does not read it, and stock's loss is trained either way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tiny
from hf_memopt import MicrobatchCallback, attach
from hf_memopt.training.binding.losses import KnownLoss
from hf_memopt.training.techniques.microbatching import step
from scarcity import Scarcity

Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Classifier(nn.Module):
    """A classifier that reads the columns of a batch as ``head`` does; passes leave traces."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.read, self.widths = head, []
        self.embed, self.classify = nn.Embedding(50, 8), nn.Linear(8, 3)
        self.passes = torch.zeros(())

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        self.widths.append(input_ids.shape[1])
        self.passes += not torch.is_grad_enabled()
        torch.rand(())
        logits = self.classify(self.read(self.embed(input_ids), attention_mask[..., None]))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def masked_mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(1) / mask.sum(1)


def mean_of_long(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.mean(1) if hidden.shape[1] > 12 else masked_mean(hidden, mask)


HEADS: dict[str, Head] = {
    "mean": lambda hidden, mask: hidden.mean(1),
    "last": lambda hidden, mask: hidden[:, -1],
    "longest": lambda hidden, mask: masked_mean(hidden, mask) * hidden.shape[1],
    "wide": mean_of_long,
    "masked": masked_mean,
}
WIDE, ONE_WIDTH = (16, 3, 5, 8), (5, 5, 5, 5)


def padded(lengths: tuple[int, ...], columns: int | None = None) -> dict[str, torch.Tensor]:
    mask = (torch.arange(columns or max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(6, 50, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 0])}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classifiers' losses are known to be means over rows, of other packages' models and where weights have hooks."""
    found, rule = step.known_loss, KnownLoss("rows", __file__)
    names = ("classify", "classifier")
    is_known = lambda model: any(hasattr(model, name) for name in names)  # noqa: E731
    monkeypatch.setattr(step, "known_loss", lambda t, items: rule if is_known(t.model) else found(t, items))


def trained(
    model: Callable[[], nn.Module],
    batches: list[Mapping[str, Any]],
    folder: Any,
    callback: Any = None,
    *,
    kind: type[transformers.Trainer] = transformers.Trainer,
    dtype: torch.dtype = torch.float64,
) -> transformers.Trainer:
    torch.manual_seed(0)
    options = {"per_device_train_batch_size": 1, "logging_strategy": "steps", "logging_steps": 1}
    trainer = kind(
        model().to(dtype),
        tiny.arguments(folder, **options, max_steps=len(batches), train_sampling_strategy="sequential"),
        train_dataset=batches,
        data_collator=lambda rows: dict(rows[0]),
    )
    attach(trainer, *([] if callback is None else [callback])).train()
    return trainer


def assert_stocks(ours: transformers.Trainer, stock: transformers.Trainer) -> None:
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (ours, stock)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert tiny.largest_difference(ours.model, stock.model) < 1e-12  # rows are added in another order


def kept(trainer: Any) -> list[Any]:
    return [change for change in trainer.memopt_changes if change.name == "micro-batches"]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("batch", [padded(WIDE), padded(ONE_WIDTH, 24)], ids=["rows of all lengths", "fixed length"])
def test_padding_is_cut_off_only_where_the_loss_does_not_read_it(name: str, batch: Any, tmp_path: Any) -> None:
    def model() -> nn.Module:
        return Classifier(HEADS[name])

    callback = MicrobatchCallback(max_examples=2)
    stock, ours = trained(model, [batch] * 2, tmp_path), trained(model, [batch] * 2, tmp_path, callback)
    assert_stocks(ours, stock)
    changes = kept(ours)
    assert (name == "masked") == (not changes)
    assert all(change.new == "padding kept" and "the loss of a row is" in change.reason for change in changes)
    widths = set(ours.model.widths[-2:])
    columns = batch["input_ids"].shape[1]
    assert (widths == {columns}) == (name != "masked")
    assert callback.tally.cut_steps == 2


def test_a_wider_batch_and_a_shorter_row_are_compared_anew_and_no_other(tmp_path: Any) -> None:
    widths = []  # of all passes: those of the check are taken off the model's list

    def read(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        widths.append(hidden.shape[1])
        return mean_of_long(hidden, mask)

    batches = [padded(lengths) for lengths in ((9, 3, 5, 8), (9, 4, 5, 8), (9, 2, 5, 8), (16, 3, 5, 8), (20, 1, 3, 9))]
    stock = trained(lambda: Classifier(mean_of_long), batches, tmp_path)
    callback = MicrobatchCallback(max_examples=2)
    ours = trained(lambda: Classifier(read), batches, tmp_path, callback)
    assert_stocks(ours, stock)
    # the loss of the batch and of its parts; with all rows a second time, since the model draws, as below with padding
    parts, kept_parts = [*(9, 9), *(9, 5)], [16] * 4
    compared, anew = [*(9, 9, 3), *(9, 3)], [*(9, 9, 2), *(9, 2)]  # losses, then gradients
    steps = [*compared, *parts, *(9, 5), *(9, 5), *anew, *(9, 5), *(16, 16, 3), *kept_parts, *(16, 16), *(20, 20)]
    assert widths == steps
    assert len(kept(ours)) == 1


def test_a_check_leaves_no_trace(tmp_path: Any) -> None:
    callback = MicrobatchCallback(max_examples=2)
    ours = trained(lambda: Classifier(masked_mean), [padded(WIDE)], tmp_path, callback)
    found = torch.get_rng_state()
    assert (ours.model.passes, ours.model.widths) == (0, [16, 8])
    trained(lambda: Classifier(masked_mean), [padded(WIDE)], tmp_path)
    torch.rand(())  # the second micro-batch's
    assert torch.equal(found, torch.get_rng_state())


def yoso() -> nn.Module:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 16}
    return transformers.YosoForSequenceClassification(transformers.YosoConfig(**sizes, **rates))


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "num_labels": 3}


def convbert() -> nn.Module:
    config = transformers.ConvBertConfig(vocab_size=50, embedding_size=32, **SIZES)
    return transformers.ConvBertForSequenceClassification(config)


def canine() -> nn.Module:
    return transformers.CanineForSequenceClassification(transformers.CanineConfig(num_hash_buckets=64, **SIZES))


@pytest.mark.parametrize(
    ("model", "seed", "reason"),
    [(convbert, 0, "of its largest at padding, not 0"), (canine, 197, "without its padding")],
    ids=["convbert", "canine"],
)
@pytest.mark.parametrize("is_adapted", [False, True], ids=["all weights", "frozen"])
def test_gradients_tell_what_the_loss_of_fresh_weights_does_not(
    model: Callable[[], nn.Module], seed: int, reason: str, is_adapted: bool, tmp_path: Any
) -> None:
    """In float32 the losses are the same but for rounding. No weight gets a gradient from the comparison."""
    gradients = []

    def fresh() -> nn.Module:
        torch.manual_seed(seed)
        made = model().requires_grad_(not is_adapted)
        made.classifier.requires_grad_()
        for weight in filter(lambda weight: weight.requires_grad, made.parameters()):
            weight.register_post_accumulate_grad_hook(lambda weight: gradients.append(weight.grad.clone()))
        return made

    callback, batch = MicrobatchCallback(max_examples=2), padded((24, 5, 5, 8))
    ours = trained(fresh, [batch], tmp_path, callback, dtype=torch.float32)
    (change,) = kept(ours)
    assert (change.new, callback.tally.cut_steps) == ("padding kept", 1)
    assert reason in change.reason
    assert (
        0 < len(gradients) <= 2 * sum(weight.requires_grad for weight in ours.model.parameters())
    )  # of two micro-batches
    assert all(weight.requires_grad for weight in ours.model.classifier.parameters())
    assert all(weight.requires_grad != is_adapted for weight in ours.model.base_model.parameters())


def test_padding_is_kept_for_a_known_loss_after_memory_ran_out(tmp_path: Any) -> None:
    scarcity = Scarcity(limit=40)

    def scarce() -> nn.Module:
        model = yoso()
        scarcity.watch(model)
        return model

    stock = trained(yoso, [padded(WIDE)] * 2, tmp_path)
    ours = trained(scarce, [padded(WIDE)] * 2, tmp_path, MicrobatchCallback())
    assert_stocks(ours, stock)
    assert scarcity.errors == 1
    assert [change.new for change in kept(ours)] == ["padding kept"]


def bart() -> nn.Module:
    sizes = {"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.1}
    layers = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **layers))


def bigcode() -> nn.Module:
    config = transformers.GPTBigCodeConfig(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    return transformers.GPTBigCodeForCausalLM(config)


def falcon() -> nn.Module:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, hidden_dropout=0.1))


@pytest.mark.parametrize("model", [bart, bigcode, falcon])
def test_dropout_is_no_difference(model: Callable[[], nn.Module], tmp_path: Any) -> None:
    """BART and GPTBigCode hold its probability in attributes; Falcon reads its configuration, and is not compared."""
    batch = padded(WIDE)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    callback = MicrobatchCallback(max_examples=2)
    ours = trained(model, [{**batch, "labels": labels}], tmp_path, callback)
    assert (kept(ours), callback.tally.cut_steps) == ([], 1)
