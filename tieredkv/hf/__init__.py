"""The seam to transformers; the only place, with the cache, that knows it.

seam: the attention and mask functions named "tieredkv", and version differences. layers: what transformers sees as a
layer. attachment: the tie to a model or config. positions: whether a forward continues the cache.

Imports: everything to its left; transformers.
"""
