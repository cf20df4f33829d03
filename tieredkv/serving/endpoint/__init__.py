"""The endpoint over HTTP, in OpenAI's form: what is refused, who asks, how answers go out, and the app that has it all.

`app` is what to begin with. It alone is imported here: the others need the packages of the extra `serve`.

Imports: app.
"""

from __future__ import annotations

from tieredkv.serving.endpoint.app import EndpointSettings, build, engine_settings_for, need_packages

__all__ = ["EndpointSettings", "build", "engine_settings_for", "need_packages"]
