"""The errors with which a forward is refused.

Imports: errors.
"""

from __future__ import annotations

from tieredkv.errors import ClosedError, HandleError, MismatchError, TrainingModeError


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


def not_attended(which: str) -> HandleError:
    """The error for new keys alone that came to another attention, which would have taken them for all there are."""
    return HandleError(
        f"{which} got its new keys alone, and no attention over blocks followed; the step is not valid.",
        wanted='the attention implementation "tieredkv" in the model that is called, as in the first forward',
        got="another attention, or a direct call of update",
        change='model.set_attn_implementation("tieredkv") on that model, or TieredCache(model) for it; do not change '
        "the attention in mid-forward. Then reset the cache and prefill again",
    )


def taken_back() -> MismatchError:
    """The error for the rest of a forward in which a public method of the cache was called."""
    return MismatchError(
        "This forward was taken back while it ran, by a call of one of the cache's methods.",
        wanted="copies, saves, crops and the like between forwards",
        got="one in a hook, or in another thread, before the forward came to its last layer",
        change="call it after the forward, and feed this forward's tokens again",
    )


def gradients(what: str) -> TrainingModeError:
    """Gradients would be lost without a word: neither the store nor attention over blocks keeps a graph."""
    return TrainingModeError(
        "A TieredCache keeps no gradients.",
        wanted="inference",
        got=f"{what} with gradients enabled",
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


def no_such_row(held: int, got: str) -> MismatchError:
    """Rows to keep that are not there, or none."""
    return MismatchError(
        "The cache cannot be made of these rows.",
        wanted=f"at least one of rows 0 to {held - 1}",
        got=got,
        change="reset the cache to drop every row",
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


def not_of_this_store() -> MismatchError:
    """The error for a cache that is published by a `KVStore` which did not make it."""
    return MismatchError(
        "The cache's blocks do not lie in this store.",
        wanted="a cache that this store made",
        got="another one",
        change="take caches from store.cache(...)",
    )
