"""``python -m granikv_sglang.bench_serving``: SGLang's serving benchmark, shared-prefix load, comparison."""
