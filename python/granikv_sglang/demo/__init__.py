"""``python -m granikv_sglang.demo``: two teams of agents answered by a real model, GraniKV next to stock SGLang."""
