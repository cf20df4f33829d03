"""Chooses a request's tokens as `generate` would: transformers' logits processors and stopping criteria, per request.

The only file that knows how transformers makes these from a `GenerationConfig`.

Imports: errors; transformers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from tieredkv.errors import ConfigError

_REFUSED: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "guidance_scale": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
}
"""Settings that need more than one row or more than one forward for a token, and their value when off."""


class Sampler:
    """One request's choice of tokens.

    Args:
        model: the model, for its defaults.
        config: what the request asks for; None for the model's defaults.
        prompt_tokens: length of the prompt.
        tokenizer: needed for stop strings.
        seed: of the request's own generator, for sampling.

    Raises:
        ConfigError: a way of decoding that a request cannot have, or no positive number of new tokens.
    """

    def __init__(
        self, model: Any, config: GenerationConfig | None, prompt_tokens: int, tokenizer: Any, seed: int | None
    ) -> None:
        config, _ = model._prepare_generation_config(copy.deepcopy(config))
        for name, off in _REFUSED.items():
            value = getattr(config, name, off)
            if value is not None and value != off and not (name == "guidance_scale" and value == 1):
                raise ConfigError(
                    "A request decodes one sequence, one token at a time.",
                    wanted=f"{name}={off}",
                    got=f"{name}={value}",
                    change="use model.generate with a TieredCache for this way of decoding",
                )
        self.most_tokens = _most_tokens(config, prompt_tokens)
        config.max_length, config.max_new_tokens = prompt_tokens + self.most_tokens, None
        model._prepare_special_tokens(config, False, device="cpu", batch_size=1)
        self._processors = model._get_logits_processor(config, input_ids_seq_length=prompt_tokens, device="cpu")
        criteria = model._get_stopping_criteria(config, StoppingCriteriaList(), tokenizer=tokenizer)
        self._prompt_tokens = prompt_tokens
        # Both of these are looked up without a tensor operation for each token.
        ours = (MaxLengthCriteria, EosTokenCriteria)
        self._criteria = [criterion for criterion in criteria if not isinstance(criterion, ours)]
        eos = getattr(config, "_eos_token_tensor", None)
        self._ends = frozenset() if eos is None else frozenset(eos.flatten().tolist())
        self._samples = bool(config.do_sample)
        self._generator: torch.Generator | None = None
        if self._samples:
            self._generator = torch.Generator()
            self._generator.manual_seed(torch.seed() if seed is None else seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit wins, whatever came before: then rows can be chosen for together."""
        return not self._processors and not self._samples

    def choose(self, ids: torch.Tensor, logits: torch.Tensor) -> int:
        """The next token.

        Args:
            ids: int64 `[length]`, prompt and tokens so far.
            logits: `[vocabulary]`.

        Raises:
            ConfigError: the request's settings leave no token to choose, or a processor refuses them only now.
        """
        scores = logits.float().cpu().unsqueeze(0)
        try:
            if self._processors:
                scores = self._processors(ids.unsqueeze(0), scores)
            if not self._samples:
                return int(scores.argmax())
            return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise ConfigError(
                "No token can be chosen with the request's settings.",
                wanted="settings of sampling that fit the model",
                got=str(error).splitlines()[0] if str(error) else type(error).__name__,
                change="other sampling settings",
            ) from error

    def ended_by(self, ids: torch.Tensor, token: int) -> str | None:
        """ "stop" or "length" when these ids, of which `token` is the newest, are the last ones; else None."""
        if token in self._ends:
            return "stop"
        if any(bool(criterion(ids.unsqueeze(0), None).any()) for criterion in self._criteria):
            return "stop"
        return "length" if len(ids) - self._prompt_tokens >= self.most_tokens else None


def largest(logits: torch.Tensor) -> list[int]:
    """Where the largest logit of each row lies, the first of equals.

    Args:
        logits: `[rows, vocabulary]`.
    """
    if logits.device.type == "cpu":
        return [int(index) for index in logits.float().numpy().argmax(-1)]  # three times as fast as torch's on a CPU
    return [int(index) for index in logits.argmax(-1).tolist()]


def _most_tokens(config: GenerationConfig, prompt_tokens: int) -> int:
    most = config.max_new_tokens
    if most is None:
        most = (config.max_length or 20) - prompt_tokens
    if most < 1:
        raise ConfigError(
            "No new tokens were asked for.",
            wanted="max_new_tokens of at least 1",
            got=f"max_new_tokens={config.max_new_tokens}, max_length={config.max_length}, prompt of {prompt_tokens}",
            change="give max_new_tokens in the generation config",
        )
    return int(most)
