"""When a forward begins, ends, counts, or is taken back.

There is no hook after the last layer, so a forward ends at the next one or at the next public call. A forward that did
not reach every layer is taken back; what cannot go back, a linear state, is refused from then on, and handed to nobody.
A model with nothing to tier has the same cycle without a store.

Imports: everything to its left; transformers' cache layers.
"""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import LinearAttentionCacheLayerMixin

from tieredkv.hf import refusals
from tieredkv.hf.others import OtherLayers
from tieredkv.hf.positions import Positions
from tieredkv.hf.states import LinearStates, State, StateWatch, Touch, has_state
from tieredkv.hf.tenancy import Tenancy
from tieredkv.hf.ways import Ways
from tieredkv.plan import ForwardPlan
from tieredkv.store import planner


class Cycle(LinearStates):
    """The part of a `TieredCache` that knows which forward is open. Not made by itself."""

    _place: Tenancy
    _others: OtherLayers
    _tiered: list[int]
    _first: int  # the model's first layer with attention, or -1
    _positions: Positions
    _ways: Ways

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._closed = False
        self._asked = True  # for a length or a mask since the last update, as a new forward does
        self._broken: str | None = None
        self._states = StateWatch()
        self._untiered: ForwardPlan | None = None  # the forward that is open, of a model with nothing to tier
        self._interrupted = False  # the last forward was taken back by a public call, and may still be running
        self._whole: ForwardPlan | None = None  # the forward that is open, once every layer was updated

    def _watch_state(self, touch: Touch) -> None:
        """A model comes to a linear state; it may begin a forward."""
        layer = self._others.layers.get(touch.layer)
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            return  # transformers' own method refuses
        if touch.how == "look" and not self._asked and self._states.is_looked_at(touch):
            return
        self._asked = False
        plan = self._open
        if not has_state(layer) and (self._tokens if plan is None else plan.past):
            self._broken = f"an earlier forward did not come to the linear-attention state of layer {touch.layer}"
            self._check_usable()
        is_over = plan is not None and len(plan.updated) == len(self._tiered)
        first = self._first if self._first >= 0 else len(self.layers)
        if self._states.begins_forward(touch, layer, first=first, is_open=plan is not None, is_over=is_over):
            self._finish()
            if self._states.start(touch, layer):
                self._broken = (
                    f"the linear-attention state of layer {touch.layer} went ahead in a forward that broke off"
                )
            self._check_usable()
        elif plan is None and self._interrupted:
            self._check_beginning(self._states.leads(touch, first, is_open=False))

    def _told_of_state(self, state: State) -> None:
        self._states.told(state)

    def _check_beginning(self, is_first: bool) -> None:
        """Refuse the rest of a forward that a public call took back: it would begin another in mid-model."""
        if self._interrupted and not is_first:
            raise refusals.taken_back()
        self._interrupted = False

    def _end_forward(self) -> None:
        """What every public operation begins with: the forward before it ends.

        Raises:
            MismatchError: what is not tiered went ahead and cannot go back, so it is neither used nor handed out.
        """
        self._finish(is_public=True)
        if self._place.holder is None and self._tiered:
            self._others.reset_windows()
        self._broken = self._broken or self._states.ahead
        self._check_usable()
        self._states.rest()

    def _finish(self, *, is_public: bool = False) -> None:
        """End the forward that is open: it counts if it came to every layer, else it is taken back.

        Args:
            is_public: no other begins now, and this one may be running on, in a hook or beside another thread.
        """
        self._check_usable()
        plan, linear = self._open, self._others.linear
        if plan is None:
            one = self._states.is_of_one
            if self._first < 0 and self._states.came_to(linear, one=one, past=1):
                self._states.end(linear, one=one)
            return
        if not self._is_whole(plan):
            self._take_back()
            self._interrupted = is_public
            return
        try:
            self._ways.end_forward()
            self._states.end(linear, one=_is_of_one(plan))
            self._untiered = None
            if self._place.store is not None and self._place.holder is not None:
                planner.commit(self._place.store, self._place.holder)
            self._others.forget()
        except Exception:
            self._take_back()
            raise

    @property
    def _open(self) -> ForwardPlan | None:
        """The forward that is open."""
        holder = self._place.holder
        return self._untiered if holder is None else holder.plan

    @property
    def _tokens(self) -> int:
        """Tokens of each row before the forward that is open."""
        if self._place.holder is not None:
            return self._place.holder.tokens
        if self._tiered or self._first < 0:
            return 0
        first: Any = self.layers[self._first]
        return int(first.get_seq_length()) if self._untiered is None else self._untiered.past

    def _is_whole(self, plan: ForwardPlan) -> bool:
        """Whether the forward that is open came to all layers that keep something of it."""
        if self._whole is not plan and len(plan.updated) == len(self._tiered):
            linear = self._others.linear
            came = self._states.came_to(linear, one=_is_of_one(plan), past=plan.past)
            came = came or (plan is self._untiered and self._states.are_elsewhere(linear))
            self._whole = plan if came and self._others.have(plan.total) else None
        return self._whole is plan

    def _take_back(self) -> None:
        """The forward that is open, if one is, did not happen."""
        if self._place.store is not None and self._place.holder is not None:
            planner.rollback(self._place.store, self._place.holder)
        elif self._untiered is None:
            return
        tokens, self._untiered = self._tokens, None
        self._ways.forget_forward()
        self._positions.take_back()
        self._states.take_back()
        self._broken = self._others.roll_back(tokens)

    def _check_open(self) -> None:
        if self._closed:
            raise refusals.closed()
        if self._place.store is not None:
            self._place.store.check_usable()

    def _check_usable(self) -> None:
        self._check_open()
        if self._broken is not None:
            raise refusals.out_of_step(self._broken)

    def _empty(self) -> None:
        """Drop every token."""
        self._interrupted = self._open is not None and not self._is_whole(self._open)
        self._untiered = None
        self._ways.forget_forward()
        self._states = StateWatch()
        self._broken = None
        if self._place.store is not None and self._place.holder is not None:
            with self._place.store.lock:
                planner.rollback(self._place.store, self._place.holder)
                self._place.holder.table.clear()
                self._place.holder.tokens, self._place.holder.exact_tokens = 0, None
        self._positions.forget()
        self._others.reset()


def _is_of_one(plan: ForwardPlan) -> bool:
    """Whether a forward is of one token, after others: for those many models write states in place."""
    return plan.new == 1 and bool(plan.past)
