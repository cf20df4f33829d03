"""What it takes to hold a cache beside transformers' own, in the demo and in the doctor's bisection.

Imports nothing of the package.
"""

from __future__ import annotations

import inspect
from typing import Any

LOGIT_TOLERANCE = 1e-4
"""Most difference of raw fp32 logits, relative to the largest: what rounding in another order of sums leaves."""


def cache_keyword(model: Any) -> str:
    """What this transformers calls a cache: "cache" from 5.24 on, where the older name gives a warning."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
