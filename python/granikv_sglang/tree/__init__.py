"""The radix tree with HOT spans, the promotion policy, and the audit. Adapters are imported from their modules."""

from granikv_sglang.tree.policy import NodeView, Segment, rank_segments

__all__ = ["NodeView", "Segment", "rank_segments"]
