"""GraniKV: shared-prefix decode for SGLang, as an overlay on the released package."""

__version__ = "0.1.0"
