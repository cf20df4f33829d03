"""`tieredkv serve`: a model behind an OpenAI-compatible endpoint, with the KV cache of all requests in three tiers.

Imports: everything to its left; typer and rich.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from tieredkv import sizing
from tieredkv.cli.model import Loaded, load, quiet
from tieredkv.cli.telling import errors_told, terminal
from tieredkv.config import DEFAULT_WINDOW_TOKENS, CacheSettings, ColdSettings, parse_bytes
from tieredkv.device import device_for
from tieredkv.durable import DurableSettings
from tieredkv.errors import ConfigError
from tieredkv.kv_store import KVStore
from tieredkv.serving import Engine, EngineSettings, Room, preset
from tieredkv.serving.endpoint import EndpointSettings, build, engine_settings_for, need_packages
from tieredkv.serving.memory import fill_memory
from tieredkv.sizing import format_bytes

_UTILIZATION = ("--memory-utilization", "--gpu-memory-utilization")
_WARM = "a quarter of free memory; on a CPU with hot open, a third of what utilization leaves"


@dataclasses.dataclass(frozen=True)
class Serving:
    """Everything that was chosen.

    Args:
        model: a folder or hub id, and a .gguf file in it.
        dtype, device: of the model.
        cache: of the store; hot may be open.
        durable: where prefixes are kept.
        engine, endpoint: choices of both.
        utilization: see `fill_memory`.
        drain_seconds: how long requests may go on after a signal to stop.
    """

    model: str
    gguf_file: str | None
    dtype: str
    device: str | None
    cache: CacheSettings
    durable: DurableSettings | Literal[False]
    engine: EngineSettings
    endpoint: EndpointSettings
    utilization: float
    drain_seconds: float


@errors_told()
def serve(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file or hub id.", metavar="MODEL")],
    gguf_file: Annotated[str | None, typer.Option(help="A .gguf file of MODEL.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call it.", show_default="MODEL")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for any that is free.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Who may ask; several times for several.", envvar="TIEREDKV_API_KEY")
    ] = None,
    choose: Annotated[str | None, typer.Option("--preset", help="chat or documents; other options win.")] = None,
    memory_utilization: Annotated[float, typer.Option(*_UTILIZATION, help="Of the device, where hot is open.")] = 0.9,
    max_model_len: Annotated[int, typer.Option(help="Most tokens of a request.", min=1)] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests at once.", min=1)] = 64,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 128,
    hot: Annotated[str | None, typer.Option(help='"2GiB" or "4096 tokens".', show_default="by utilization")] = None,
    warm: Annotated[str | None, typer.Option(help="The same forms.", show_default=_WARM)] = None,
    cold: Annotated[Path | None, typer.Option(help="Folder; prefixes are kept there.", show_default="none")] = None,
    cold_cap: Annotated[str | None, typer.Option(help="Most bytes of it.", show_default="what the disk has")] = None,
    window: Annotated[
        int | None, typer.Option(help="Recent tokens that stay hot.", show_default=str(DEFAULT_WINDOW_TOKENS))
    ] = None,
    codec: Annotated[str | None, typer.Option(help="Below hot: raw, fp8, int8 or int4.", show_default="raw")] = None,
    hot_codec: Annotated[str | None, typer.Option(help="The same name: encoded on the device too.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16; auto: as the weights are.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is one")] = None,
    max_body: Annotated[str, typer.Option(help="Most bytes of a request's body.")] = "4MiB",
    drain_seconds: Annotated[float, typer.Option(help="For requests that run when it is stopped.", min=0)] = 30.0,
) -> None:
    """Serve a model to OpenAI clients: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    Exit code 0: stopped by a signal; 2: it cannot be served.
    """
    if cold is None and cold_cap is not None:
        raise ConfigError(
            "There is no folder that --cold-cap would limit.",
            wanted="--cold FOLDER beside it",
            got=f"--cold-cap {cold_cap} alone",
            change="give --cold too, or neither",
        )
    cache, engine = CacheSettings(), EngineSettings()
    if choose is not None:
        cache, engine = preset(choose, cache, engine)
    folder = None if cold is None else ColdSettings(cold, cap=cold_cap)
    given: dict[str, Any] = {"hot": hot, "warm": warm, "cold": folder, "window": window}
    given |= {"codec": codec, "hot_codec": hot_codec}
    chosen = Serving(
        model=model,
        gguf_file=gguf_file,
        dtype=dtype,
        device=device,
        cache=CacheSettings.chosen(cache, block_size=block_size, **given),
        durable=False if cold is None else DurableSettings(cold, cap=cold_cap),
        engine=dataclasses.replace(engine, max_running=max_num_seqs, max_model_len=max_model_len),
        endpoint=EndpointSettings(served_model_name or model, tuple(api_key or ()), parse_bytes(max_body)),
        utilization=memory_utilization,
        drain_seconds=drain_seconds,
    )
    run(chosen, host, port, terminal())


def run(chosen: Serving, host: str, port: int, console: Console) -> None:
    """Serve until a signal comes.

    Args:
        chosen: what to serve.
        host, port: where to listen.
        console: where is said what is served.

    Raises:
        TieredKVError: it cannot be served.
    """
    need_packages()
    # transformers' own name for the keyword, which serves the whole range of its versions that we support.
    warnings.filterwarnings("ignore", ".past_key_values. is deprecated", FutureWarning)
    from tieredkv.serving.endpoint.server import serve as answer
    from tieredkv.serving.endpoint.server import take_port
    from tieredkv.serving.metrics import EngineMetrics

    taken = take_port(host, port)
    with taken, quiet():
        dtype = chosen.dtype if chosen.dtype == "auto" else sizing.parse_dtype(chosen.dtype)
        loaded = load(chosen.model, dtype, chosen.device, chosen.gguf_file)
        settings = fill_memory(chosen.cache, device_for(loaded.model.device), chosen.utilization)
        metrics = EngineMetrics()
        with (
            KVStore(loaded.model, settings=settings, durable=chosen.durable) as store,
            _engine(loaded, store, chosen.engine, metrics) as engine,
        ):
            app = build(engine, loaded.model, loaded.tokenizer, chosen.endpoint, metrics)
            _say(console, loaded, engine, settings)
            address, actual_port = taken.getsockname()[:2]
            url = f"http://[{address}]:{actual_port}" if ":" in address else f"http://{address}:{actual_port}"
            answer(app, taken, chosen.drain_seconds, lambda: _ready(console, chosen.endpoint, url))
            engine.close(drain=True)
            ended = engine.stats().finished
            reasons = "".join(f", {count:,} {reason}" for reason, count in sorted(ended.items()))
            console.print(f"stopped    {sum(ended.values()):,} requests{reasons}", highlight=False)


def _engine(loaded: Loaded, store: KVStore, settings: EngineSettings, metrics: Any) -> Engine:
    settings = engine_settings_for(loaded.model, settings)
    engine = Engine(loaded.model, store, settings, tokenizer=loaded.tokenizer, timings=metrics)
    metrics.watch(engine)
    return engine


def _say(console: Console, loaded: Loaded, engine: Engine, settings: CacheSettings) -> None:
    """What was loaded, and what fits."""
    room, longest = engine.room(), engine.settings.max_model_len or 0
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    console.print(
        f"model      {loaded.name}, {dtype}, {loaded.model.device}", highlight=False, markup=False, soft_wrap=True
    )
    console.print(f"KV         {format_bytes(room.token_bytes)} per token, codec {settings.codec}", highlight=False)
    for line in tier_lines(room):
        console.print(line, highlight=False)
    sequences = room.sequences(longest)
    many = "as many as the disk holds" if sequences is None else f"{sequences:,}"
    console.print(f"sequences  {many} of {longest:,} tokens at once", highlight=False)


def tier_lines(room: Room) -> list[str]:
    """One line for each tier: how many tokens it holds."""
    return [
        f"{role:<10} " + ("as many tokens as the disk holds" if tokens is None else f"{tokens:,} tokens")
        for role, tokens in room.tier_tokens.items()
    ]


def _ready(console: Console, endpoint: EndpointSettings, url: str) -> None:
    who = f"{len(endpoint.api_keys)} API keys" if endpoint.api_keys else "no API key"
    console.print(f"serving    {endpoint.name} at {url}, {who}", highlight=False, markup=False, soft_wrap=True)
