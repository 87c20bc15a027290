"""The general plug-in: SGLang calls :func:`register` in every process (entry point ``sglang.srt.plugins``)."""

from __future__ import annotations


def register() -> None:
    """Register the radix cache, the attention backend and the hooks with SGLang.

    What goes wrong here is only logged by SGLang; the factories registered here check again and refuse to serve.
    """
    # Imported here: the platform plug-in shares this package and is loaded while SGLang is still half imported.
    from granikv_sglang.plugin.loader import load  # noqa: PLC0415

    load()
