"""Tiles of positions: which modules, losses and gradients against stock's, operations, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import auto_heads
import pytest
import torch
import transformers
from architectures import ARCHITECTURES, cases, head
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt import TiledLayersCallback, attach, stream_layers
from hf_memopt.techniques import checkpoint_layers, tile_layers
from hf_memopt.training.binding import enable_checkpointing
from language_models import distance, gradients

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
IN_FLOAT32 = ("deepseek_v4",)  # which connects its layers in float32, whatever the weights are
IDS = torch.randint(5, 99, (2, 37), generator=torch.Generator().manual_seed(0))


WIDE = [name for name in auto_heads.SIZES if "inter" in name or "ff" in name]
SIZES = dict.fromkeys((*WIDE, "n_inner", "d_inner", "hidden_dim"), 96)  # of MLPs, three times as wide as the model


def trained(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the gradients."""
    torch.manual_seed(0)
    loss = model(**batch).loss
    return loss.detach(), gradients(loss, model)


def llama(**settings: Any) -> Any:
    return tiny.llama(**{"intermediate_size": 128, **settings}).double().train()


def of_llama(model: Any, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return trained(model, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("kind", cases("tiled"))
def test_losses_and_gradients_are_those_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 12 positions or experts of 24 tokens are at least two tiles; with and without checkpointing."""
    model, batch = head(kind, SIZES, monkeypatch)
    most = 1e-7 if kind in IN_FLOAT32 else 1e-12
    for is_checkpointed in (False, True):
        if is_checkpointed:
            if kind == "albert" or not model.supports_gradient_checkpointing:  # stock refuses
                continue
            checkpoint_layers(model)
        loss, whole = trained(model, batch)
        with tile_layers(model, 16) as handle:
            names = list(handle.modules)
            found, tiled = trained(model, batch)
        assert abs(found - loss) <= most
        assert distance(tiled, whole) <= most
    assert all(name.rstrip("0123456789").rstrip(".").endswith(ARCHITECTURES[kind]["tiled_module"]) for name in names)


def test_routers_are_not_tiled_and_their_scores_are_recorded_once() -> None:
    """A padding mask and the loss of the router, which reads the scores of whole rows."""
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 4, "output_router_logits": True}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).double().train()
    model.set_experts_implementation("eager")
    mask = torch.ones_like(IDS)
    mask[1, 20:] = 0
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS}
    loss, whole = trained(model, batch)
    aux = model(**batch).aux_loss
    handle = tile_layers(model, 16)
    found, tiled = trained(model, batch)
    assert [*handle.modules] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert torch.equal(model(**batch).aux_loss, aux)
    assert (float(abs(found - loss)), distance(tiled, whole)) <= (1e-15, 1e-12)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("is_quantized", [False, True], ids=["float32", "nf4"])
def test_adapters_have_the_same_gradients(is_quantized: bool, is_checkpointed: bool) -> None:
    model: Any = tiny.llama(hidden_size=64, intermediate_size=128).train()
    if is_quantized:
        in_four_bits(model)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.enable_input_require_grads()
    if is_checkpointed:
        checkpoint_layers(model)
    loss, whole = of_llama(model)
    assert set(tile_layers(model, 16).modules) == {f"base_model.model.model.layers.{i}.mlp" for i in range(2)}
    found, tiled = of_llama(model)
    assert abs(found - loss) <= 1e-6 * loss
    assert distance(tiled, whole) <= 2e-6  # sums of float32 in another order


def in_four_bits(model: Any) -> None:
    for layer in model.model.layers:
        for name, linear in [*layer.mlp.named_children()][:3]:
            made = Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
            made.load_state_dict(linear.state_dict())
            setattr(layer.mlp, name, made.to("cpu"))


def test_each_parameter_gets_its_gradient_once() -> None:
    """As gradient release needs it: a hook that fired for each tile would step each time."""
    model, fired = llama(), []
    checkpoint_layers(model)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    tile_layers(model, 8)
    of_llama(model)
    assert sorted(fired) == sorted(name for name, _ in model.named_parameters())


def test_evaluation_is_tiled_too() -> None:
    model = llama().eval()
    with torch.no_grad():
        whole = model(input_ids=IDS).logits
        tile_layers(model, 16)
        assert not model.training
        torch.testing.assert_close(model(input_ids=IDS).logits, whole, rtol=1e-13, atol=1e-13)


def calls_of(module: nn.Module) -> list[int]:
    """Return the positions of each call of a part of the module, filled while it is called."""
    found: list[int] = []
    module.register_forward_hook(lambda _, args, output: found.append(args[0].shape[1]) and None)
    return found


@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_in_sixteen_bits_that_are_trained_have_eight_tiles_at_most(is_frozen: bool) -> None:
    """Their gradients are added up in 16 bits, rounded each time; frozen ones have none."""
    model = tiny.llama(intermediate_size=128, max_position_embeddings=256).bfloat16().train()
    model.model.layers.requires_grad_(not is_frozen)
    tile_layers(model, 8)
    ids = IDS.repeat(1, 7)[:, :256]
    of_llama(model, ids)  # compares the first batch
    positions = calls_of(model.model.layers[0].mlp.up_proj)
    with torch.no_grad():
        model(input_ids=ids)
    assert positions == [4] * 64 if is_frozen else positions == [32] * 8


@pytest.mark.parametrize("is_autocast", [False, True])
def test_sixteen_bits_err_little_more_than_stocks(is_autocast: bool) -> None:
    """Under autocast a tile casts the weights anew, so that its gradients are added up in float32."""
    model = llama(max_position_embeddings=512)
    ids = torch.randint(5, 99, (2, 512), generator=torch.Generator().manual_seed(1))
    _, exact = of_llama(model, ids)
    model = model.float() if is_autocast else model.bfloat16()

    def error() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            found = of_llama(model, ids)[1]
        return distance(
            {name: found[name] for name in found if "mlp" in name}, {n: exact[n] for n in found if "mlp" in n}
        )

    stocks = error()
    tile_layers(model, 16)
    assert error() <= (1.05 if is_autocast else 1.5) * stocks


def test_the_trainer_s_checkpointing_becomes_non_reentrant(tmp_path: Path) -> None:
    """Stock's default of transformers 5.8, which no argument asks for."""
    args = tiny.arguments(tmp_path, max_steps=1, per_device_train_batch_size=2)
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS.tolist()]
    trainer = attach(Trainer(tiny.llama(), args, train_dataset=rows, callbacks=[TiledLayersCallback(8)]))
    enable_checkpointing(trainer.model, {"use_reentrant": True})
    trainer.train()
    options = [layer._gradient_checkpointing_func.keywords for layer in trainer.model.model.layers]
    assert options == [{"use_reentrant": False}] * 2
    (change,) = trainer.memopt_changes
    assert str(change) == (
        "2 modules, such as model.layers.0.mlp: 'all positions at once' -> 'tiles of 8 tokens' (each works on each "
        "position alone)"
    )


@pytest.mark.parametrize("size", [None, 4])
def test_a_second_trainer_of_a_tiled_model_has_the_same_tiles(size: int | None, tmp_path: Path) -> None:
    model, args = tiny.llama(intermediate_size=128), tiny.arguments(tmp_path)
    before = [vars(layer.mlp).keys() for layer in model.model.layers]
    first, second = (TiledLayersCallback(size) for _ in range(2))
    trainers = [Trainer(model, args, callbacks=[one, one]) for one in (first, second)]
    assert [attach(one).memopt_changes for one in trainers] == [tuple(first.changes)] * 2
    with pytest.raises(ValueError, match="not the size") as error:
        tile_layers(model, 8)
    assert str(error.value) == (
        f"tile_tokens=8 is not the size of the tiles that LlamaForCausalLM has already, {size}; expected one size for "
        f"a model. Pass tile_tokens={size}, or call handle.remove() of the first"
    )
    first.handle.remove()
    with torch.no_grad():
        positions = calls_of(model.model.layers[0].mlp.up_proj)
        model(input_ids=IDS.to(model.device))
        assert len(positions) == (1 if size is None else 19)  # of 37 positions in 2 rows
    second.handle.remove()
    assert [vars(layer.mlp).keys() for layer in model.model.layers] == before
    tile_layers(model, 8).remove()


def much(hidden: torch.Tensor) -> torch.Tensor:
    """Return numbers of the hidden ones alone, which keep four times as many."""
    return hidden.exp().sin().exp().sin().exp().sin().exp()


class Mixing(nn.Module):
    """Adds to each position the mean of all."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return much(hidden) + hidden.mean(1, keepdim=True).exp()


class Carrying(nn.Module):
    """Goes on where the call before left off, as a recurrence does; its first position is the first of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = hidden.new_zeros(()) if self.last is None else self.last
        before = torch.cat([first.expand_as(hidden[:, :1]), hidden[:, :-1]], 1)
        self.last = hidden[0, -1].detach()
        return much(hidden) + before.exp()


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return much(hidden)


class Choosing(nn.Module):
    """Scales each position by its largest number, as a router picks an expert."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return much(hidden) * hidden.topk(1).values


class Roomy(nn.Module):
    """Works on each position alone as long as there are few of them."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return much(hidden) if hidden.shape[1] <= 16 else much(hidden) + hidden.mean()


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_attention_that_rounding_hides_is_seen(kind: str) -> None:
    """Of new weights in 16 bits the attention adds less to a layer than a rounding of its output."""
    model = getattr(tiny, kind)(intermediate_size=128).bfloat16()
    assert all(name.endswith(("mlp", "feed_forward_chunk")) for name in tile_layers(model).modules)


def test_the_first_batch_is_compared_too() -> None:
    model = llama()
    model.model.layers[1].mlp = Roomy()
    tile_layers(model, 16)
    with pytest.raises(RuntimeError) as error:
        of_llama(model)
    assert str(error.value) == (
        "model.layers.1.mlp mixes positions in this batch, though not in the probe; expected what it returns for all "
        "positions at once. Undo the tiles: handle.remove()"
    )


def test_dropout_that_comes_after_the_first_batch_is_refused() -> None:
    """A tile would be recomputed with other random numbers than it drew."""
    model = llama()
    tile_layers(model, 16)
    of_llama(model)
    config = LoraConfig(r=2, target_modules=["up_proj"], lora_dropout=0.1)
    adapted = get_peft_model(model, config)
    with pytest.raises(RuntimeError, match="draws random numbers in training in this batch, though not in the probe"):
        of_llama(adapted)


@pytest.mark.gpu
def test_layers_that_wait_in_host_memory_are_refused() -> None:
    model = tiny.llama(num_hidden_layers=3)
    with stream_layers(model), pytest.raises(ValueError, match=r"^streamed layers and tiled layers are incompatible: "):
        tile_layers(model)
