"""The errors with which a forward is refused.

Imports: errors.
"""

from __future__ import annotations

from tieredkv.errors import ClosedError, MismatchError, TrainingModeError


def no_such_layer(layer_idx: int, layers: int) -> MismatchError:
    """The error for keys and values of a layer that the cache's model does not have."""
    return MismatchError(
        "Keys and values of a layer that the cache's model does not have.",
        wanted=f"{layers} layers",
        got=f"layer {layer_idx}",
        change="use one cache per model",
    )


def layer_again(layer_idx: int) -> MismatchError:
    """The error for a layer that comes a second time in one forward, before the others had their first."""
    return MismatchError(
        f"Layer {layer_idx} was updated a second time in one forward.",
        wanted="one update of each layer in each forward",
        got="a second one, before the other layers had their first",
        change="for a model with cross-attention, EncoderDecoderCache(TieredCache(config), "
        "DynamicCache(config=config)); for one that runs its layers in loops, DynamicCache",
    )


def gradients() -> TrainingModeError:
    """Keys that need gradients."""
    return TrainingModeError(
        "Keys that need gradients cannot be stored.",
        wanted="inference",
        got="key_states.requires_grad with gradients enabled",
        change="model.eval() and `with torch.no_grad():` (generate does both)",
    )


def other_rows(held: int, got: int) -> MismatchError:
    """Another batch."""
    return MismatchError(
        "Another number of batch rows than the cache holds.",
        wanted=held,
        got=got,
        change="reset the cache, or batch_repeat_interleave / batch_select_indices it first",
    )


def out_of_step(reason: str) -> MismatchError:
    """Layers of unlike lengths, which cannot be taken back."""
    return MismatchError(
        "The cache's layers no longer agree.",
        wanted="layers of one length",
        got=reason,
        change="cache.reset() and prefill again",
    )


def closed() -> ClosedError:
    """A cache after `close`."""
    return ClosedError("The cache is closed.", wanted="an open cache", got="closed", change="make a new one")
