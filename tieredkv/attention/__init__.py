"""Attention over blocks: the native kernel, partials with their LSE, compiled FlexAttention, masks, and the engine.

call: what is asked for one layer. lse: partials and their merge. native, native_source: the kernel of a CPU;
over_pools: where it reads. plain, flash: what computes partials; partials: which of these serves. kernels, flex: the
compiled calls of FlexAttention. masks, windowed: what a mask says. engine: one layer's attention over a forward's plan.

Imports: everything to its left; torch. Never transformers.
"""
