"""Where a model's numbers come from: a config object, a dict, a folder, a file or a hub id, read field by field.

transformers is imported only where a config has to be loaded; a config object that is given needs no import.

Imports: errors only.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError

# Other spellings of the same field, for configs that transformers' attribute_map has not translated already.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "kv_n_heads"),
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "dtype": ("torch_dtype",),
    "head_dim": ("d_kv", "kv_channels", "attention_head_dim"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "d_ff", "ffn_dim"),
}


def load_config(source: object) -> Any:
    """The config that `source` names.

    Args:
        source: a config object (returned as it is), a dict of its fields, a folder that holds a config.json, such a
            file, or a hub id (asked of the hub, unless it is in the local cache).

    Raises:
        ConfigError: nothing there, or not a config.
    """
    if isinstance(source, dict):
        return _from_fields(source)
    if not isinstance(source, (str, os.PathLike)):
        return source
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _from_file(file)
    if path.is_dir() or path.suffix == ".json" or path.is_absolute():
        raise ConfigError(
            "There is no model config at the path given.",
            wanted="a folder with a config.json, or such a file",
            got=str(path),
            change="give the folder that the model was saved to",
        )
    return _from_hub(str(source))


def decoder_config(config: Any) -> Any:
    """The part of a config that describes the text decoder; the config itself where there is only one part."""
    get_text_config = getattr(config, "get_text_config", None)
    if get_text_config is not None:
        return get_text_config(decoder=True)
    nested = getattr(config, "text_config", None)
    if nested is None:
        return config
    return types.SimpleNamespace(**nested) if isinstance(nested, dict) else nested


def read_field(config: object, name: str) -> Any:
    """A field under its usual name or another spelling, None where there is none."""
    for spelling in (name, *_SPELLINGS.get(name, ())):
        value = getattr(config, spelling, None)
        if value is not None:
            return value
    return None


def read_int(config: object, name: str, default: int | None = None) -> int:
    """A field that is a whole number.

    Raises:
        ConfigError: it is missing and there is no default, or it is something else.
    """
    value = read_field(config, name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            f"A model config has no usable {name}.",
            wanted=f"{name} as a whole number",
            got=value,
            change=f"set {name} in the config, or give the config of the whole model",
        )
    return value


def _read_json(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "A model config cannot be read.", wanted="a JSON file", got=f"{file}: {error}", change="check the file"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            "A model config cannot be read.",
            wanted="a JSON object",
            got=f"{file}: {type(fields).__name__}",
            change="give the config.json of a model",
        )
    return fields


def _from_file(file: Path) -> Any:
    fields = _read_json(file)
    config_class = _config_class(fields)
    # The class reads the file itself: it decodes what JSON cannot say, such as an infinite limit.
    return _construct(config_class.from_pretrained, str(file), file) if config_class else _plain(fields)


def _from_fields(fields: dict[str, Any]) -> Any:
    config_class = _config_class(fields)
    return _construct(config_class.from_dict, fields, "a dict") if config_class else _plain(fields)


def _config_class(fields: dict[str, Any]) -> Any:
    """transformers' config class for a model type; None where it does not know it, or none is named."""
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[str(fields.get("model_type"))]
    except KeyError:  # the mapping is filled lazily, so that its `get` finds nothing
        return None


def _plain(fields: dict[str, Any]) -> types.SimpleNamespace:
    """The fields as they stand: a model that this transformers does not know still says its sizes."""
    return types.SimpleNamespace(**fields)


def _construct(build: Callable[[Any], Any], argument: object, source: object) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return build(argument)
    except (StrictDataclassError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            "The fields do not make a config of their model type.",
            wanted="the fields of a config.json",
            got=f"{source}: {str(error).strip().splitlines()[-1]}",
            change="correct the field that is named",
        ) from error


def _from_hub(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "A model config was found neither on this machine nor on the hub.",
            wanted="a folder, a config.json, or a hub id that can be reached",
            got=f"{name}: {str(error).splitlines()[0]}",
            change="give a local path, or download the config first",
        ) from error
