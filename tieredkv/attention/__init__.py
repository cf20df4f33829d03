"""Attention over blocks: partials with their LSE, compiled FlexAttention over the pool, masks, and the engine.

lse: partials and their merge. plain, flash: what computes them. partials: which of these serves. kernels, flex: the
compiled calls. masks: what a model's mask says. engine: one layer's attention over a forward's plan.

Imports: everything to its left; torch. Never transformers.
"""
