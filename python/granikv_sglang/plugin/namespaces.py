"""Who may share a prefix: ``extra_key``, LoRA id and cache salt, spelled so that no two of them can be taken for one.

SGLang joins them without a mark between: salt ``acme`` is also salt ``ac`` with extra key ``me``, and an extra key that
ends in an adapter's id is that adapter's namespace. Whoever chooses one part could then spell another tenant's whole.
"""

from __future__ import annotations


def spell(extra_key: str | None, lora_id: str | None) -> str | None:
    """The extra key to hand to SGLang, which appends ``lora_id`` to it.

    What comes out, with the id appended, is different for every pair. None stays None: requests of no namespace share.
    """
    if extra_key is None:
        return None if lora_id is None else "l"
    return f"{'k' if lora_id is None else 'b'}{len(extra_key)}:{extra_key}"


def salted(secret: str, salt: str, extra_key: str | None) -> str:
    """One extra key for a salt and an extra key. ``secret`` is the server's own, so no client spells this."""
    return f"{secret}:{len(salt)}:{salt}{extra_key or ''}"
